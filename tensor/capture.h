// What the library notes for a thread that captures a graph of CUDA work; see cuda::Graph.
#pragma once
#include <memory>

#include <tandem/tensor/device.h>

namespace tandem {

class Tensor;
struct TensorImpl;

/// Is told what a thread uses that captures a graph of `device`.
class CaptureWatch {
 public:
  explicit CaptureWatch(Device of) : device(of) {}
  virtual ~CaptureWatch() = default;
  /// A tensor whose memory operations use.
  virtual void used(const std::shared_ptr<TensorImpl>& tensor, bool written) = 0;
  /// A leaf whose gradient, `now`, is about to be replaced; with `depends`, to be read or added to.
  virtual void gradient(const std::shared_ptr<TensorImpl>& leaf, const Tensor& now, bool depends) = 0;

  const Device device;
};
/// Null unless the calling thread is capturing a graph.
inline thread_local constinit CaptureWatch* t_capture_watch = nullptr;

namespace cuda {
/// Whether the calling thread is capturing a graph: nothing that it gives to the device runs now.
inline bool capturing() { return t_capture_watch != nullptr; }
}  // namespace cuda

}  // namespace tandem
