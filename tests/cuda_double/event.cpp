// Events: each record makes a signal of its own, so that a wait is ordered after that record and after nothing later.
// Times are those of the worker that passes the event. What it cannot catch: events shared between processes.
#include <optional>

#include "graph.h"
#include "runtime.h"
#include "stream.h"

struct CUevent_st {
  int device = 0;
  unsigned flags = 0;
  cuda_double::SignalRef last = {};                // of the last record, if that was not in a capture
  std::optional<cuda_double::Mark> captured = {};  // if it was
};

using namespace cuda_double;

namespace {

/// Asking for an event that a capture recorded is an error by itself, and spoils the capture.
cudaError_t check_host_use(cudaEvent_t event, const char* name) {
  if (!event->captured) return forbid_in_capture(nullptr, name);
  event->captured->capture->invalidate();
  return reject(cudaErrorCapturedEvent, "{}: the event was last recorded in a capture", name);
}

}  // namespace

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call([&] {
    if (flags & ~(cudaEventBlockingSync | cudaEventDisableTiming)) return cudaErrorInvalidValue;
    *event = new CUevent_st{current_device(), flags};
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return call([&] {
    delete event;
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call([&] {
    require_explicit(stream, "cudaEventRecord");
    if (event->device != stream->device)
      return reject(cudaErrorInvalidResourceHandle, "cudaEventRecord: the event is of device {}, the stream of {}",
                    event->device, stream->device);
    if (dropped(Order::record)) return cudaSuccess;
    if (stream->capture) return stream->capture->record(stream->lane, event->captured.emplace());
    event->captured.reset();
    event->last = SignalRef::make();
    stream->worker->push([signal = event->last] {
      timespec now = {};
      clock_gettime(CLOCK_MONOTONIC, &now);
      signal->nanoseconds.store(now.tv_sec * 1'000'000'000 + now.tv_nsec, std::memory_order_relaxed);
      signal->done.publish(1);
    });
    return cudaSuccess;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return call([&] {
    require_explicit(stream, "cudaStreamWaitEvent");
    if (flags != cudaEventWaitDefault) return reject(cudaErrorNotSupported, "cudaStreamWaitEvent: flags {}", flags);
    if (dropped(Order::wait)) return cudaSuccess;
    if (event->captured) {
      Capture& capture = *event->captured->capture;
      if (!capture.active()) return cudaErrorCapturedEvent;
      if (!stream->capture || stream->capture.get() == &capture) return capture.wait(stream, *event->captured);
      capture.invalidate();
      stream->capture->invalidate();
      return cudaErrorStreamCaptureMerge;
    }
    if (stream->capture) {
      stream->capture->invalidate();
      return reject(cudaErrorStreamCaptureIsolation,
                    "cudaStreamWaitEvent: a capturing stream waits for an event from outside of the capture");
    }
    if (event->last) stream->worker->push([signal = event->last] { signal->done.wait(1); });
    return cudaSuccess;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return call([&] {
    if (cudaError_t error = check_host_use(event, "cudaEventSynchronize")) return error;
    if (event->last && !dropped(Order::synchronise)) event->last->done.wait(1);
    return cudaSuccess;
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return call([&] {
    if (cudaError_t error = check_host_use(event, "cudaEventQuery")) return error;
    return !event->last || dropped(Order::query) || event->last->done.reached(1) ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return call([&] {
    for (cudaEvent_t event : {start, end}) {
      if (cudaError_t error = check_host_use(event, "cudaEventElapsedTime")) return error;
      if (event->flags & cudaEventDisableTiming || !event->last) return cudaErrorInvalidResourceHandle;
    }
    if (start->device != end->device) return cudaErrorInvalidResourceHandle;
    if (!start->last->done.reached(1) || !end->last->done.reached(1)) return cudaErrorNotReady;
    *milliseconds = static_cast<float>(end->last->nanoseconds - start->last->nanoseconds) * 1e-6f;
    return cudaSuccess;
  });
}

}  // extern "C"
