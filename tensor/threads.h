// Threads: how many a kernel may use, splitting a range over them, and one worker thread per device.
#pragma once
#include <atomic>
#include <cstdint>
#include <span>

#include <tandem/tensor/callable.h>
#include <tandem/tensor/device.h>

namespace tandem {

/// Number of cores that this process may run on.
int available_cores();
/// Sets the number of threads that all CPU devices share; each of k devices gets max(1, count / k).
/// The default is OMP_NUM_THREADS, else the number of cores this process may run on.
void set_num_threads(int count);
/// The number set by set_num_threads.
int num_threads();
/// Threads that kernels of one CPU device use when the calling thread starts them.
int threads_per_device();

/// Kernels started by the calling thread use that thread alone until it is destroyed: for threads that work beside
/// those that compute, and for bits that do not depend on the number of threads. Operations recorded meanwhile keep to
/// one thread in their backward too. With `single` false it changes nothing.
class SingleThreadScope {
 public:
  explicit SingleThreadScope(bool single = true);
  ~SingleThreadScope();
  SingleThreadScope(const SingleThreadScope&) = delete;
  SingleThreadScope& operator=(const SingleThreadScope&) = delete;

 private:
  bool previous_;
};

/// Calls body(begin, end) over pieces of [0, n) on the device's threads; pieces are multiples of `grain` (the last may
/// be short). Runs inline when there is one thread or at most one grain of work. The body must not throw.
/// The caller's ThreadContext (grad mode, replica, random stream) holds in it.
template <class Body>
void parallel_for(std::int64_t n, std::int64_t grain, const Body& body);

/// Calls body(i) for every i in [0, devices.size()) at the same time: 0 on the calling thread, each other on a worker
/// thread that is kept for its device. Returns when all are done. If bodies throw, the exception of the smallest i is
/// rethrown. A body may call this function itself. The caller's ThreadContext holds in every body.
void run_on_devices(std::span<const Device> devices, FunctionRef<void(int)> body);

/// Waits until `word` differs from `old`. Spins for some 400 us first, since waking a sleeping thread takes 70 us and
/// more; not when `spin` is false or there are more threads than cores.
void wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t old, bool spin = true);

namespace detail {
void parallel_run(std::int64_t pieces, FunctionRef<void(std::int64_t)> body);
int threads_for(std::int64_t n, std::int64_t grain);
}  // namespace detail

template <class Body>
void parallel_for(std::int64_t n, std::int64_t grain, const Body& body) {
  const int threads = detail::threads_for(n, grain);
  if (threads <= 1) {
    if (n > 0) body(std::int64_t{0}, n);
    return;
  }
  const std::int64_t grains = (n + grain - 1) / grain;
  detail::parallel_run(threads, [&](std::int64_t piece) {
    const std::int64_t begin = grains * piece / threads * grain;
    const std::int64_t end = grains * (piece + 1) / threads * grain;
    body(begin, end < n ? end : n);
  });
}

}  // namespace tandem
