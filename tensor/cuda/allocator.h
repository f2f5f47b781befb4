// Memory of CUDA devices, from CUDA's own pool in the order of streams, and page-locked memory of the host.
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

/// Page-locked memory, 64-byte aligned, from a cache. A block given back is used again when the copies that were noted
/// for it are done.
void* allocate_pinned(std::size_t bytes);
void release_pinned(void* data);
/// Whether `data` lies in a block of allocate_pinned; if so, what `stream`, whose device is current, has been given so
/// far still uses it.
bool note_pinned_use(const void* data, cudaStream_t stream);

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
