// A stream is a worker, a thread that takes one operation after the other. Host to worker there is an edge where an
// operation is pushed; worker to host only where the host synchronises, or a query finds the work done.
#pragma once
#include <cuda_runtime_api.h>
#include <tandem/tensor/callable.h>

#include <memory>
#include <mutex>

#include "quiet.h"

namespace cuda_double {

using Body = tandem::UniqueFunction<void()>;
class Capture;

/// Runs bodies in order. Workers are never destroyed: a later stream takes over an idle one.
class Worker {
 public:
  static Worker* take(int device);
  /// For others to take over, once all that was pushed has run.
  void give_back();

  void push(Body body);
  /// Waits for all that was pushed before the call.
  void synchronize() const { done_.wait(pushed_.load(std::memory_order_relaxed)); }
  bool idle() const { return done_.reached(pushed_.load(std::memory_order_relaxed)); }

 private:
  struct Operation;
  Worker();
  void run();

  std::mutex mutex_;  // of host threads that push
  Operation* newest_;
  Operation* latest_done_;
  alignas(64) std::atomic<uint32_t> pushed_{0};
  alignas(64) Counter done_;
  int device_ = 0;
  bool taken_ = true;
  friend void synchronize_device(int device);
};

/// Waits for every worker of a device.
void synchronize_device(int device);

/// Work of a device (-1: of the host) as a worker runs it: with access to the memory, not at all once the device is
/// lost.
void run_work(int device, const Body& body);
/// With TANDEM_CUDA_DOUBLE_DELAY=seed: a short random pause, so that orders vary that nothing fixes.
void shake();

/// Dies for the legacy and the per-thread default stream, which Tandem never uses.
void require_explicit(cudaStream_t stream, const char* call);
/// Puts work into a stream, or into the graph that the stream is capturing.
cudaError_t enqueue(cudaStream_t stream, Body body);
cudaError_t enqueue_on(int device, cudaStream_t stream, Body body);

}  // namespace cuda_double

struct CUstream_st {
  cuda_double::Worker* worker = nullptr;
  int device = 0, priority = 0;
  unsigned flags = 0;
  unsigned long long id = 0;
  std::shared_ptr<cuda_double::Capture> capture = {};  // while it captures
  int lane = 0;                                        // its place in the capture
};
