// What the library notes for a thread that captures a graph of CUDA work; see cuda::Graph.
#pragma once
#include <memory>

namespace tandem {

class Storage;

/// Is told of all memory that the operations of a capturing thread use.
class CaptureWatch {
 public:
  virtual ~CaptureWatch() = default;
  virtual void used(const std::shared_ptr<Storage>& storage, bool written) = 0;
};
/// Null unless the calling thread is capturing a graph.
inline thread_local constinit CaptureWatch* t_capture_watch = nullptr;

namespace cuda {
/// Whether the calling thread is capturing a graph: nothing that it gives to the device runs now.
inline bool capturing() { return t_capture_watch != nullptr; }
}  // namespace cuda

}  // namespace tandem
