// The store of signals: a free list that ThreadSanitizer does not see.
#include "quiet.h"

#include <sched.h>

namespace cuda_double {
namespace {

int lock_word = 0;
Signal* free_signals = nullptr;

CUDA_DOUBLE_UNSEEN void lock() {
  while (__atomic_exchange_n(&lock_word, 1, __ATOMIC_ACQUIRE)) sched_yield();
}
CUDA_DOUBLE_UNSEEN void unlock() { __atomic_store_n(&lock_word, 0, __ATOMIC_RELEASE); }

CUDA_DOUBLE_UNSEEN Signal* take_free() {
  lock();
  Signal* signal = free_signals;
  if (signal) {
    free_signals = signal->next_free;
    signal->references = 1;
  }
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
  if (made.signal_) {
    made.signal_->done.reset();
  } else {
    made.signal_ = new Signal;
    count_references(made.signal_, 1);
  }
  return made;
}

void SignalRef::add(int count) {
  if (signal_ && count_references(signal_, count) == 0) give_back(signal_);
}

}  // namespace cuda_double
