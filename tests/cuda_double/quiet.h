// How the threads of the double wait for each other. ThreadSanitizer must see the order that CUDA promises and no
// other, or a missing event would be hidden: so raw futexes, acquire only where a wait has ended, and reference counts
// that it does not see. Condition variables, std::atomic::wait and shared_ptr in a worker would all add order.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <utility>

namespace cuda_double {

#define CUDA_DOUBLE_UNSEEN __attribute__((noinline, no_sanitize("thread")))

/// Sleeps while the word still holds `seen`; returns for any reason. `shared` words lie in memory of several processes.
inline void futex_wait(const std::atomic<uint32_t>& word, uint32_t seen, bool shared = false,
                       const timespec* limit = nullptr) {
  syscall(SYS_futex, &word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, seen, limit, nullptr, 0);
}

inline void futex_wake(const std::atomic<uint32_t>& word, bool shared = false) {
  syscall(SYS_futex, &word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

/// A number that only grows. Who waited for n has an edge from the thread that published it; who only asked in vain has
/// none.
class Counter {
 public:
  bool reached(uint32_t n) const {
    if (!is_at(value_.load(std::memory_order_relaxed), n)) return false;
    value_.load(std::memory_order_acquire);
    return true;
  }
  void wait(uint32_t n) const {
    while (!reached(n)) {
      uint32_t seen = value_.load(std::memory_order_relaxed);
      if (!is_at(seen, n)) futex_wait(value_, seen);
    }
  }
  void publish(uint32_t n) {
    value_.store(n, std::memory_order_release);
    futex_wake(value_);
  }
  void reset() { value_.store(0, std::memory_order_relaxed); }

 private:
  static bool is_at(uint32_t value, uint32_t n) { return static_cast<int32_t>(value - n) >= 0; }
  std::atomic<uint32_t> value_{0};
};

/// One completion: set once, by the operation that records an event. Its memory is reused, but never given back.
struct Signal {
  Counter done;
  std::atomic<int64_t> nanoseconds{0};  // when it was set
  int references = 0;
  Signal* next_free = nullptr;
};

/// Owns a part of a signal. Workers drop theirs without telling anybody.
class SignalRef {
 public:
  SignalRef() = default;
  static SignalRef make();
  SignalRef(const SignalRef& other) : signal_(other.signal_) { add(1); }
  SignalRef(SignalRef&& other) noexcept : signal_(std::exchange(other.signal_, nullptr)) {}
  SignalRef& operator=(SignalRef other) noexcept {
    std::swap(signal_, other.signal_);
    return *this;
  }
  ~SignalRef() { add(-1); }
  explicit operator bool() const { return signal_ != nullptr; }
  Signal* operator->() const { return signal_; }

 private:
  void add(int count);
  Signal* signal_ = nullptr;
};

}  // namespace cuda_double
