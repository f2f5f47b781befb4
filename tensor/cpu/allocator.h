// The CPU's caching allocator: freed blocks are kept by size class, a pool per virtual device. A training step that
// repeats allocates nothing from the system, so it meets no page faults.
#pragma once
#include <cstddef>

#include <tandem/tensor/storage.h>

namespace tandem::cpu {

/// At least `bytes` bytes, 64-byte aligned, uninitialised. Throws Error with the pool's state when memory is short.
void* allocate(Device device, std::size_t bytes);
/// Gives a block of allocate(device, bytes) back to the device's pool, from any thread.
void release(Device device, void* data, std::size_t bytes);
// See storage.h.
MemoryStats memory_stats(Device device);
void reset_peak_memory(Device device);
void empty_cache();

}  // namespace tandem::cpu
