// Memory of CUDA devices, from CUDA's own pool in the order of streams.
#pragma once
#include <cstddef>
#include <memory>

#include <tandem/tensor/cuda/runtime.h>
#include <tandem/tensor/storage.h>

namespace tandem::cuda {

MemoryStats memory_stats(int device);
void reset_peak_memory(int device);
/// Gives unused memory of every device back to the system, or of one.
void empty_cache();
void empty_cache(int device);

/// Memory for products, in the order of the calling thread's stream; not counted as the tensors'.
void* allocate_workspace(Device device, std::size_t bytes);
/// In the order of a stream of the device. Never throws.
void release_workspace(int device, void* data, std::size_t bytes, cudaStream_t stream);

/// Memory of a device that is freed in the order of the calling thread's stream when this goes.
class Scratch {
 public:
  Scratch(Device device, std::size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data() const { return data_; }

 private:
  Device device_;
  std::size_t bytes_;
  void* data_;
};

}  // namespace tandem::cuda
