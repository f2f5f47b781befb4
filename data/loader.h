// DataLoader: the batches of a dataset, in a range-for. Worker threads, if any, prepare batches ahead and hand them out
// in order; what the loop sees does not depend on their number.
#pragma once
#include <iterator>
#include <memory>

#include <tandem/data/dataset.h>
#include <tandem/data/sampler.h>

namespace tandem::data {

/// How a loader cuts a dataset into batches, and who prepares them.
struct DataLoaderOptions {
  int64_t batch_size = 1;
  bool shuffle = false;                        // a new order in every epoch
  std::shared_ptr<Sampler> sampler = nullptr;  // the order of rows, instead of shuffle
  int num_workers = 0;                         // threads that prepare batches; 0: the caller does
  bool drop_last = false;                      // leave out a last batch that is not full
  std::uint64_t seed = 0;                      // of the order and of random numbers drawn by the dataset
  // Batches on the CPU lie in page-locked memory, from which .to(device, true) copies to a CUDA device while the
  // program goes on. With a worker, the next batches are made and put there meanwhile.
  bool pin_memory = false;
};

namespace detail {

/// Makes the batch of some rows; called by several threads at the same time.
using MakeBatch = UniqueFunction<std::vector<Tensor>(std::span<const int64_t>)>;

/// One pass over the data. Destroying it in the middle stops and joins the threads.
class EpochRun {
 public:
  EpochRun(const DataLoaderOptions& options, std::vector<int64_t> rows, int64_t epoch, int64_t first_batch,
           MakeBatch make);
  EpochRun(EpochRun&&) noexcept;
  ~EpochRun();
  /// The next batch; false after the last one. What making it threw is thrown here, once, and ends the pass.
  bool next(std::span<Tensor> batch);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace detail

/// The part of a DataLoader that does not depend on the number of tensors.
class DataLoaderBase {
 public:
  /// Number of batches an epoch has.
  int64_t size() const;
  int64_t batch_size() const { return options_.batch_size; }
  /// The epoch that the next begin() starts; each begin() moves on by one. It is kept in the sampler.
  int64_t epoch() const { return options_.sampler->epoch(); }
  /// Makes the next begin() start epoch `epoch`. Its order depends on the seed and this number only.
  void set_epoch(int64_t epoch) { options_.sampler->set_epoch(epoch); }
  /// Makes the next begin() leave out the first `count` batches of its epoch, without reading them: training resumes
  /// in the middle of an epoch by set_epoch and skip_batches. Throws Error unless 0 <= count <= size().
  void skip_batches(int64_t count);

 protected:
  DataLoaderBase(int64_t dataset_size, DataLoaderOptions options);
  detail::EpochRun start(int64_t dataset_size, detail::MakeBatch make);

 private:
  DataLoaderOptions options_;
  int64_t skip_ = 0;
};

/// Batches of a dataset's examples: `for (auto [x, y] : DataLoader(dataset, {.batch_size = 64}))`. The dataset is kept
/// by value (copies of the library's own share their data) or by shared_ptr. Each begin() starts the next epoch; a loop
/// may be left at any time. An exception from the dataset reaches the loop at its batch and ends that epoch; the loader
/// can be used again. Throws Error for a batch_size below 1, a negative num_workers, a sampler together with shuffle,
/// or pin_memory where there is no CUDA device.
template <std::size_t N>
class DataLoader : public DataLoaderBase {
 public:
  template <class D>
  requires std::derived_from<D, Dataset<N>> DataLoader(D dataset, DataLoaderOptions options = {})
      : DataLoader(std::make_shared<const D>(std::move(dataset)), std::move(options)) {}
  template <class D>
  requires std::derived_from<D, Dataset<N>> DataLoader(std::shared_ptr<D> dataset, DataLoaderOptions options = {})
      : DataLoaderBase(dataset ? dataset->size() : -1, std::move(options)), dataset_(std::move(dataset)) {}

  /// The batches of one epoch, one at a time.
  class Iterator {
   public:
    explicit Iterator(detail::EpochRun run) : run_(std::move(run)) { ++*this; }
    std::array<Tensor, N>& operator*() { return batch_; }
    Iterator& operator++() {
      batch_ = {};  // before the next one is made, which then finds its memory free and warm
      done_ = !run_.next(batch_);
      return *this;
    }
    bool operator==(std::default_sentinel_t) const { return done_; }

   private:
    detail::EpochRun run_;
    std::array<Tensor, N> batch_;
    bool done_ = false;
  };

  /// Starts an epoch and makes its first batch.
  Iterator begin() {
    return Iterator(start(dataset_->size(), [dataset = dataset_](std::span<const int64_t> rows) {
      std::array<Tensor, N> batch = dataset->get_batch(rows);
      return std::vector<Tensor>(std::move_iterator(batch.begin()), std::move_iterator(batch.end()));
    }));
  }
  std::default_sentinel_t end() const { return {}; }

 private:
  std::shared_ptr<const Dataset<N>> dataset_;
};
template <class D>
DataLoader(D, DataLoaderOptions = {}) -> DataLoader<D::arity>;
template <class D>
DataLoader(std::shared_ptr<D>, DataLoaderOptions = {}) -> DataLoader<D::arity>;

}  // namespace tandem::data
