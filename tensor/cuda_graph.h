// CUDA graphs: a whole training step is recorded once and then given to the device by one launch.
#pragma once
#include <memory>

#include <tandem/tensor/callable.h>
#include <tandem/tensor/device.h>

namespace tandem::cuda {

/// The work of a function on one CUDA device, recorded by capture() and run by replay().
///
///     for (int i = 0; i < 3; ++i) step();    // makes what is made at a first step, such as an optimizer's state
///     graph.capture([&] { step(); });        // runs nothing
///     for (...) {
///       x.copy_(next_x);                     // new data, into the tensors that step() reads
///       graph.replay();
///       loss.item<float>();                  // from the tensors that step() wrote to
///     }
class Graph {
 public:
  /// Throws Error when the device is no CUDA device or does not exist.
  explicit Graph(Device device = DeviceType::cuda);
  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;

  /// Calls `body` once and records the work it gives to the device; none of it runs, and what the host counts (random
  /// numbers, optimizer steps) stays as it was. Tensors that the body makes have values after the first replay.
  /// Gradients are afterwards those of before, or none where the body has dropped them. The memory of tensors that it
  /// reads or writes is kept as long as the graph. What needs values on the host (item(), to("cpu"), printing), copies
  /// from the host, work on another device, a first step of an optimizer, and its step of parameters elsewhere are
  /// Errors, as is what the body throws: the graph is then empty as before.
  void capture(FunctionRef<void()> body);
  /// Whether there is something to replay.
  bool captured() const;
  /// Gives the recorded work to the device, in the order of the calling thread's other work there, and goes on. The
  /// host does its part as in an ordinary step: random numbers are drawn and optimizer steps counted anew, and the
  /// learning rate is that of now. Gradients of leaves are those that the body would leave. One thread at a time.
  /// Throws Error, and has no effect, when nothing was captured, when an optimizer is gone, when tensors that the body
  /// used have other memory, shapes or strides since, and when it went on from gradients that are not there now, or
  /// from none where there are some.
  void replay();

 private:
  struct State;
  Device device_;
  std::unique_ptr<State> state_;  // null until captured
};

}  // namespace tandem::cuda
