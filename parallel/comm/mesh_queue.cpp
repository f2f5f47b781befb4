#include <tandem/parallel/comm/mesh_queue.h>

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include <tandem/parallel/comm/mesh.h>
#include <tandem/tensor/threads.h>
#include <tandem/tensor/trace.h>

namespace tandem::parallel {
namespace {

class QueuedCall;

// Works may outlive the queue.
struct Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<QueuedCall>> entries;  // that have not begun
  bool stopping = false;
  const pid_t process = getpid();
};

class QueuedCall final : public Work::State {
 public:
  QueuedCall(std::shared_ptr<Shared> shared, const Collective& c) : call(c), shared_(std::move(shared)) {}
  bool poll() override {
    const std::lock_guard lock(shared_->mutex);
    return done;
  }
  void wait() override {
    check(getpid() == shared_->process, "wait", "this process was forked from process {}, which does the work",
          shared_->process);
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

// What the call moves on this rank, the larger of input and output.
std::int64_t bytes_of(const Collective& c) {
  std::int64_t bytes = 0;
  for (const Tensor& t : {c.input, c.output})
    if (t.defined()) bytes = std::max(bytes, t.nbytes());
  return bytes;
}

}  // namespace

struct CallQueue::State {
  void run_all();

  UniqueFunction<void(Collective&)> run;
  std::shared_ptr<Shared> shared = std::make_shared<Shared>();
  std::thread thread = {};
};

CallQueue::CallQueue(UniqueFunction<void(Collective&)> run) : state_(new State{.run = std::move(run)}) {
  state_->thread = std::thread([this] { state_->run_all(); });
}

CallQueue::~CallQueue() {
  {
    const std::lock_guard lock(state_->shared->mutex);
    state_->shared->stopping = true;
  }
  state_->shared->changed.notify_all();
  state_->thread.join();
}

Work CallQueue::push(const Collective& call) {
  auto entry = std::make_shared<QueuedCall>(state_->shared, call);
  {
    const std::lock_guard lock(state_->shared->mutex);
    state_->shared->entries.push_back(entry);
  }
  state_->shared->changed.notify_all();
  return Work(std::move(entry));
}

void CallQueue::State::run_all() {
  const SingleThreadScope one_thread;
  const NoBrokenPipeSignal no_signal;
  std::unique_lock lock(shared->mutex);
  for (;;) {
    shared->changed.wait(lock, [this] { return shared->stopping || !shared->entries.empty(); });
    if (shared->entries.empty()) return;
    std::shared_ptr<QueuedCall> entry = std::move(shared->entries.front());
    shared->entries.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      const Operation operation = entry->call.operation;
      const trace::Span span(name(operation), is_message(operation) ? trace::kMessages : trace::kCommunication,
                             {"bytes", trace::is_on() ? bytes_of(entry->call) : 0});
      run(entry->call);
    } catch (...) {
      error = std::current_exception();
    }
    entry->call = {};
    lock.lock();
    entry->error = std::move(error);
    entry->done = true;
    entry.reset();  // before anyone sees it: the error ends with those who wait for it
    shared->changed.notify_all();
  }
}

}  // namespace tandem::parallel
