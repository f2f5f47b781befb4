// The loader's threads: workers claim batches in order and put them into a ring that the caller empties.
#include <tandem/data/loader.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include <tandem/data/internal.h>
#include <tandem/tensor/cuda.h>
#include <tandem/tensor/random.h>
#include <tandem/tensor/threads.h>
#include <tandem/tensor/trace.h>

namespace tandem::data {
namespace {

constexpr int kPrefetch = 2;  // batches a worker may be ahead
constexpr int kMaxWorkers = 256;

int64_t count_batches(int64_t rows, const DataLoaderOptions& options) {
  return rows / options.batch_size + (rows % options.batch_size != 0 && !options.drop_last);
}

}  // namespace

namespace detail {

// Batches are claimed in order by workers that are at most `slots_.size()` ahead of the caller; batch b waits in slot
// b % slots_.size() until the caller takes it.
struct EpochRun::Impl {
  Impl(const DataLoaderOptions& options, std::vector<int64_t> rows, int64_t epoch, int64_t first_batch, MakeBatch make)
      : rows_(std::move(rows)),
        batch_size_(options.batch_size),
        seed_(options.seed),
        stream_(kExampleStreams + static_cast<std::uint64_t>(epoch)),
        pin_memory_(options.pin_memory),
        make_(std::move(make)),
        count_(count_batches(static_cast<int64_t>(rows_.size()), options)),
        claimed_(std::min(first_batch, count_)),
        taken_(claimed_) {}
  ~Impl() { stop(); }

  void start_workers(int num_workers) {
    const int64_t workers = std::min<int64_t>(num_workers, count_ - taken_);
    slots_.resize(static_cast<std::size_t>(workers * kPrefetch));
    threads_.reserve(static_cast<std::size_t>(workers));
    for (int64_t i = 0; i < workers; ++i)
      threads_.emplace_back([this, track = trace::loader_track(static_cast<int>(i)), rank = trace::rank()] {
        const trace::TrackScope track_scope(track);
        const trace::RankScope rank_scope(rank);
        work();
      });
  }

  bool next(std::span<Tensor> batch) {
    if (taken_ == count_) return false;
    const trace::Span span("load batch", trace::kThisThread, {"batch", taken_});
    try {
      std::vector<Tensor> made = threads_.empty() ? make(taken_++) : take();
      std::move(made.begin(), made.end(), batch.begin());
      return true;
    } catch (...) {
      stop();
      taken_ = count_;
      throw;
    }
  }

 private:
  struct Slot {
    std::vector<Tensor> batch;
    std::exception_ptr error;
    bool ready = false;
  };

  Slot& slot(int64_t batch) { return slots_[static_cast<std::size_t>(batch) % slots_.size()]; }

  std::vector<Tensor> make(int64_t batch) const {
    const int64_t first = batch * batch_size_;
    const int64_t length = std::min(batch_size_, static_cast<int64_t>(rows_.size()) - first);
    const auto rows = std::span(rows_).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(length));
    const RandomScope random({seed_, stream_, first_block(rows[0])});
    std::vector<Tensor> made = make_(rows);
    if (pin_memory_)
      for (Tensor& x : made)
        if (x.device().is_cpu()) x = cuda::pin_memory(x);
    return made;
  }

  void work() {
    const SingleThreadScope single_thread;
    const StopScope stop_scope(&stopped_);
    for (;;) {
      int64_t batch = 0;
      {
        std::unique_lock lock(mutex_);
        const auto window = static_cast<int64_t>(slots_.size());
        room_.wait(lock, [&] { return stopped_ || claimed_ == count_ || claimed_ < taken_ + window; });
        if (stopped_ || claimed_ == count_) return;
        batch = claimed_++;
      }
      Slot made;
      try {
        const trace::Span span("make batch", trace::kThisThread, {"batch", batch});
        made.batch = make(batch);
      } catch (const Stopped&) {
        return;
      } catch (...) {
        made.error = std::current_exception();
      }
      made.ready = true;
      {
        std::lock_guard lock(mutex_);
        slot(batch) = std::move(made);
      }
      ready_.notify_one();
    }
  }

  std::vector<Tensor> take() {
    Slot made;
    {
      std::unique_lock lock(mutex_);
      ready_.wait(lock, [&] { return slot(taken_).ready; });
      made = std::exchange(slot(taken_), {});
      ++taken_;
    }
    room_.notify_one();
    if (made.error) {
      stop();  // the worker is gone before the exception goes on, so that only one thread ever touches it
      std::rethrow_exception(made.error);
    }
    return std::move(made.batch);
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    room_.notify_all();
    for (std::thread& thread : threads_)
      if (thread.joinable()) thread.join();
  }

  const std::vector<int64_t> rows_;
  const int64_t batch_size_;
  const std::uint64_t seed_, stream_;
  const bool pin_memory_;
  const MakeBatch make_;
  const int64_t count_;

  std::mutex mutex_;
  std::condition_variable room_, ready_;
  std::atomic<bool> stopped_{false};
  int64_t claimed_, taken_;  // next batch to be made, next batch to be handed out
  std::vector<Slot> slots_;
  std::vector<std::thread> threads_;
};

EpochRun::EpochRun(const DataLoaderOptions& options, std::vector<int64_t> rows, int64_t epoch, int64_t first_batch,
                   MakeBatch make)
    : impl_(std::make_unique<Impl>(options, std::move(rows), epoch, first_batch, std::move(make))) {
  impl_->start_workers(options.num_workers);
}
EpochRun::EpochRun(EpochRun&&) noexcept = default;
EpochRun::~EpochRun() = default;
bool EpochRun::next(std::span<Tensor> batch) { return impl_->next(batch); }

}  // namespace detail

DataLoaderBase::DataLoaderBase(int64_t dataset_size, DataLoaderOptions options) : options_(std::move(options)) {
  check(dataset_size >= 0, "DataLoader", "has no dataset; give one whose size() is 0 or more");
  check(options_.batch_size >= 1, "DataLoader", "batch_size is {}; give 1 or more", options_.batch_size);
  check(options_.num_workers >= 0 && options_.num_workers <= kMaxWorkers, "DataLoader",
        "num_workers is {}; give 0 to {}", options_.num_workers, kMaxWorkers);
  check(!(options_.shuffle && options_.sampler), "DataLoader",
        "shuffle and a sampler were both given; leave shuffle out, the sampler gives the order");
  if (options_.pin_memory && !cuda::is_available())  // only then is the reason looked for, by opening CUDA's module
    fail("DataLoader", "pin_memory is for copies to a CUDA device, and there is none: {}; leave it out",
         cuda::unavailable_reason());
  if (options_.sampler) return;
  if (options_.shuffle) {
    options_.sampler = std::make_shared<RandomSampler>(dataset_size, options_.seed);
  } else {
    options_.sampler = std::make_shared<SequentialSampler>(dataset_size);
  }
}

int64_t DataLoaderBase::size() const { return count_batches(options_.sampler->size(), options_); }

void DataLoaderBase::skip_batches(int64_t count) {
  check(count >= 0 && count <= size(), "skip_batches", "{} batches cannot be left out; an epoch has {}", count, size());
  skip_ = count;
}

detail::EpochRun DataLoaderBase::start(int64_t dataset_size, detail::MakeBatch make) {
  const int64_t epoch = this->epoch(), first = std::exchange(skip_, 0);
  std::vector<int64_t> rows = options_.sampler->rows();
  for (const int64_t row : rows)
    check(row >= 0 && row < dataset_size, "DataLoader", "the sampler gave row {}; the dataset has {} rows", row,
          dataset_size);
  set_epoch(epoch + 1);
  return detail::EpochRun(options_, std::move(rows), epoch, first, std::move(make));
}

}  // namespace tandem::data
