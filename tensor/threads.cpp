#include <tandem/tensor/threads.h>

#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <tandem/tensor/capture.h>
#include <tandem/tensor/error.h>
#include <tandem/tensor/thread_context.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace tandem {

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

namespace {

int initial_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS"); text != nullptr && std::atoi(text) > 0) return std::atoi(text);
  return available_cores();
}

std::atomic<int>& thread_count() {
  static std::atomic<int> count{initial_threads()};
  return count;
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

constexpr auto kNothing = [](int) {};

// A thread that runs one job at a time for one device. Workers are never destroyed: a detached thread may still be
// waiting on one when the program ends.
class Worker {
 public:
  explicit Worker(Device device) : device_(device) {
    std::thread([this] { loop(); }).detach();
  }
  Device device() const { return device_; }

  void start(FunctionRef<void(int)> body, int index, bool spin) {
    context_ = t_thread_context;
    body_ = body;
    index_ = index;
    spin_.store(spin, std::memory_order_relaxed);
    started_.fetch_add(1, std::memory_order_release);
    started_.notify_one();
  }
  std::exception_ptr join(bool spin) {
    const std::uint32_t target = started_.load(std::memory_order_relaxed);
    while (finished_.load(std::memory_order_acquire) != target) wait_for_change(finished_, target - 1, spin);
    return std::move(error_);
  }

 private:
  void loop() {
    for (std::uint32_t job = 0;; ++job) {
      wait_for_change(started_, job, spin_.load(std::memory_order_relaxed));
      try {
        const ThreadContextScope scope(context_);
        body_(index_);
      } catch (...) {
        error_ = std::current_exception();
      }
      finished_.fetch_add(1, std::memory_order_release);
      finished_.notify_one();
    }
  }

  Device device_;
  ThreadContext context_;
  FunctionRef<void(int)> body_ = kNothing;
  int index_ = 0;
  std::exception_ptr error_;
  std::atomic<bool> spin_{true};
  std::atomic<std::uint32_t> started_{0}, finished_{0};
};

// Idle workers; the one that last served a device is taken first, whose cache holds that device's data.
struct WorkerPool {
  std::mutex mutex;
  std::vector<Worker*> idle;

  Worker* take(Device device) {
    std::lock_guard lock(mutex);
    for (std::size_t i = idle.size(); i-- > 0;) {
      if (idle[i]->device() != device) continue;
      Worker* worker = idle[i];
      idle.erase(idle.begin() + static_cast<std::ptrdiff_t>(i));
      return worker;
    }
    return new Worker(device);
  }
  void give_back(std::span<Worker* const> workers) {
    std::lock_guard lock(mutex);
    idle.insert(idle.end(), workers.begin(), workers.end());
  }
};

WorkerPool& worker_pool() {
  static auto* pool = new WorkerPool();
  return *pool;
}

}  // namespace

void wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t old, bool spin) {
  for (int i = 0; spin && i < 20'000; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    pause();
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

void set_num_threads(int count) {
  check(count >= 1 && count <= 1024, "set_num_threads", "{} threads were asked for; give 1 to 1024", count);
  thread_count() = count;
}

int num_threads() { return thread_count(); }

int threads_per_device() {
  return t_thread_context.single_thread ? 1 : std::max(1, num_threads() / device_count(DeviceType::cpu));
}

SingleThreadScope::SingleThreadScope(bool single) : previous_(t_thread_context.single_thread) {
  t_thread_context.single_thread = single || previous_;
}
SingleThreadScope::~SingleThreadScope() { t_thread_context.single_thread = previous_; }

void run_on_devices(std::span<const Device> devices, FunctionRef<void(int)> body) {
  if (devices.empty()) return;
  check(
      devices.size() == 1 || !cuda::capturing(), "Graph",
      "work is divided among {} devices while a graph is captured; a graph records one device: capture a step of one, "
      "or of DistributedDataParallel",
      devices.size());
  std::vector<Worker*> workers;
  workers.reserve(devices.size() - 1);
  const bool spin = static_cast<int>(devices.size()) <= available_cores();
  // All are taken before the first starts: making a thread may fail, and none may then be running the body.
  for (const Device& device : devices.subspan(1)) workers.push_back(worker_pool().take(device));
  for (std::size_t i = 0; i < workers.size(); ++i) workers[i]->start(body, static_cast<int>(i) + 1, spin);
  std::exception_ptr first;
  try {
    body(0);
  } catch (...) {
    first = std::current_exception();
  }
  for (Worker* worker : workers) {
    std::exception_ptr error = worker->join(spin);
    if (!first) first = error;
  }
  worker_pool().give_back(workers);
  if (first) std::rethrow_exception(first);
}

namespace detail {

int threads_for([[maybe_unused]] std::int64_t n, [[maybe_unused]] std::int64_t grain) {
#if defined(_OPENMP)
  if (n <= grain || omp_in_parallel()) return 1;
  const std::int64_t grains = (n + grain - 1) / grain;
  const int threads = threads_per_device();
  return static_cast<int>(threads < grains ? threads : grains);
#else
  return 1;
#endif
}

void parallel_run(std::int64_t pieces, FunctionRef<void(std::int64_t)> body) {
#if defined(_OPENMP)
  const ThreadContext context = t_thread_context;
#pragma omp parallel num_threads(static_cast <int>(pieces))
  {
    const ThreadContextScope scope(context);
    // OpenMP may give fewer threads than asked for; the loop keeps every piece.
    for (std::int64_t piece = omp_get_thread_num(); piece < pieces; piece += omp_get_num_threads()) body(piece);
  }
#else
  for (std::int64_t piece = 0; piece < pieces; ++piece) body(piece);
#endif
}

}  // namespace detail
}  // namespace tandem
