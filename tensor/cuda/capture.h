// What kernels need while a graph is being captured. Their arguments are frozen then; what the host changes from step
// to step they read from a slot: a piece of device memory that is filled before each replay.
//
// Note [Replays]
// A captured operation is not executed, so capturing it advances nothing on the host: a draw gives its numbers back to
// its stream (repeat_draw), a step is not counted (Optimizer::replayed). Instead each replay, before it launches the
// graph, calls the refresh functions of its slots in the order in which they were asked for, on the thread that
// replays. They do what the host did in the step: draw the next key, count the step and compute its coefficients from
// the settings of now. So a replay leaves the host as an ordinary step would, and its numbers are those of an ordinary
// step. What may refuse a replay (an optimizer that is gone, parameters that have moved) is a check (at_replay): all
// checks are made before the first refresh, so that a replay that is refused has no effect.
#pragma once
#include <cstddef>
#include <string_view>
#include <vector>

#include <tandem/tensor/callable.h>
#include <tandem/tensor/cuda/graph_memory.h>
#include <tandem/tensor/cuda/slots.h>
#include <tandem/tensor/device.h>

namespace tandem::cuda {

/// Whether the calling thread's work on this device goes into a graph now.
bool capturing(Device device);

/// Memory of the device that lives as long as the graph which is being captured. Before each replay `refresh` writes
/// the new contents to host memory, aligned for any type, from where they are copied in the order of the stream.
void* slot(Device device, std::size_t bytes, UniqueFunction<void(void* host)> refresh);

/// Throws Error with this sentence while the calling thread captures a graph: for what CUDA cannot capture, before the
/// call that would spoil the capture.
void check_no_capture(std::string_view op, std::string_view problem);

/// The graph that a thread is capturing.
struct Capture {
  struct Freed {
    Device device;
    void* data = nullptr;
    std::size_t bytes = 0;
  };
  explicit Capture(Device of) : device(of), memory(of.index()), slots(of.index()) {}
  Device device;
  GraphMemory memory;
  Slots slots;
  std::vector<Freed> freed;  // tensors of before that went meanwhile: their memory is freed when the capture has ended
};
/// The calling thread's; null when it captures nothing.
Capture* current_capture();
void set_current_capture(Capture* capture);

/// Until this is destroyed the calling thread may make calls that are no part of any graph, such as cudaMalloc, without
/// spoiling its capture.
class FreeOfCapture {
 public:
  FreeOfCapture();
  ~FreeOfCapture();
  FreeOfCapture(const FreeOfCapture&) = delete;
  FreeOfCapture& operator=(const FreeOfCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace tandem::cuda
