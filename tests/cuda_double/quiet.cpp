// The store of signals: a free list that ThreadSanitizer does not see.
#include "quiet.h"

#include <sched.h>
#include <sys/mman.h>

#include <bit>
#include <cstdlib>

namespace cuda_double {
namespace {

int lock_word = 0;
Signal* free_signals = nullptr;

CUDA_DOUBLE_UNSEEN void lock() {
  while (__atomic_exchange_n(&lock_word, 1, __ATOMIC_ACQUIRE)) sched_yield();
}
CUDA_DOUBLE_UNSEEN void unlock() { __atomic_store_n(&lock_word, 0, __ATOMIC_RELEASE); }

// By the system call itself: ThreadSanitizer takes what an allocator gives as written by the thread that has asked, and
// a signal goes from thread to thread. Zeros are a new signal.
CUDA_DOUBLE_UNSEEN void add_free() {
  constexpr size_t kBytes = 1 << 16;
  const long memory = syscall(SYS_mmap, nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == -1) std::abort();
  auto* const signals = std::bit_cast<Signal*>(memory);
  for (size_t i = 0; i < kBytes / sizeof(Signal); ++i) {
    signals[i].next_free = free_signals;
    free_signals = &signals[i];
  }
}

CUDA_DOUBLE_UNSEEN Signal* take_free() {
  lock();
  if (!free_signals) add_free();
  Signal* signal = free_signals;
  free_signals = signal->next_free;
  signal->references = 1;
  unlock();
  return signal;
}

CUDA_DOUBLE_UNSEEN void give_back(Signal* signal) {
  lock();
  signal->next_free = free_signals;
  free_signals = signal;
  unlock();
}

CUDA_DOUBLE_UNSEEN int count_references(Signal* signal, int change) {
  return __atomic_add_fetch(&signal->references, change, __ATOMIC_ACQ_REL);
}

}  // namespace

SignalRef SignalRef::make() {
  SignalRef made;
  made.signal_ = take_free();
  made.signal_->done.reset();
  return made;
}

void SignalRef::add(int count) {
  if (signal_ && count_references(signal_, count) == 0) give_back(signal_);
}

}  // namespace cuda_double
