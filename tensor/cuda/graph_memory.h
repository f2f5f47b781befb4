// Memory of graphs. What is allocated while a graph is captured has its place for as long as the graph may be replayed:
// within the capture it is used again, in the order of the captured work, and by nothing else.
#pragma once
#include <cstddef>

namespace tandem::cuda {

/// The memory of one graph. Blocks that tensors still have when it goes stay theirs.
class GraphMemory {
 public:
  explicit GraphMemory(int device) : device_(device) {}
  ~GraphMemory();
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;

  /// Null when the device has no memory left.
  void* allocate(std::size_t bytes);
  bool holds(const void* data) const;

 private:
  int device_;
};

/// Takes back what a graph's memory gave out; false when `data` is from elsewhere.
bool release_graph_memory(void* data, std::size_t bytes);
/// Bytes that the graphs of a device hold.
std::size_t graph_memory_reserved(int device);

}  // namespace tandem::cuda
