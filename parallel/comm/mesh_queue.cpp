#include <tandem/parallel/comm/mesh_queue.h>

#include <condition_variable>
#include <deque>
#include <mutex>

#include <tandem/parallel/comm/mesh.h>
#include <tandem/tensor/threads.h>

namespace tandem::parallel {

// Works may outlive the queue.
struct CallQueue::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Entry>> entries;  // that have not begun
  bool stopping = false;
};

class CallQueue::Entry final : public Work::State {
 public:
  Entry(std::shared_ptr<Shared> shared, const Collective& c) : call(c), shared_(std::move(shared)) {}
  bool poll() override {
    const std::lock_guard lock(shared_->mutex);
    return done;
  }
  void wait() override {
    std::unique_lock lock(shared_->mutex);
    shared_->changed.wait(lock, [this] { return done; });
    if (error) std::rethrow_exception(error);
  }

  Collective call;
  bool done = false;
  std::exception_ptr error;

 private:
  const std::shared_ptr<Shared> shared_;
};

CallQueue::CallQueue(UniqueFunction<void(Collective&)> run)
    : run_(std::move(run)), shared_(std::make_shared<Shared>()), thread_([this] { run_all(); }) {}

CallQueue::~CallQueue() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stopping = true;
  }
  shared_->changed.notify_all();
  thread_.join();
}

Work CallQueue::push(const Collective& call) {
  auto entry = std::make_shared<Entry>(shared_, call);
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->entries.push_back(entry);
  }
  shared_->changed.notify_all();
  return Work(std::move(entry));
}

void CallQueue::run_all() {
  const SingleThreadScope one_thread;
  const NoBrokenPipeSignal no_signal;
  std::unique_lock lock(shared_->mutex);
  for (;;) {
    shared_->changed.wait(lock, [this] { return shared_->stopping || !shared_->entries.empty(); });
    if (shared_->entries.empty()) return;
    std::shared_ptr<Entry> entry = std::move(shared_->entries.front());
    shared_->entries.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      run_(entry->call);
    } catch (...) {
      error = std::current_exception();
    }
    entry->call = {};
    lock.lock();
    entry->error = std::move(error);
    entry->done = true;
    entry.reset();  // before anyone sees it: the error ends with those who wait for it
    shared_->changed.notify_all();
  }
}

}  // namespace tandem::parallel
