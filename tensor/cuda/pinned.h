// Page-locked memory of the host, from a cache.
#pragma once
#include <cstddef>

#include <tandem/tensor/cuda/runtime.h>

namespace tandem::cuda {

/// Page-locked memory, 64-byte aligned. A block given back is used again when the copies that were noted for it are
/// done.
void* allocate_pinned(std::size_t bytes);
/// Never throws. What then lies unused beyond a limit is given back to the system, which waits for its copies.
void release_pinned(void* data);
/// Whether `data` lies in a block of allocate_pinned; if so, what `stream`, whose device is current, has been given so
/// far still uses it.
bool note_pinned_use(const void* data, cudaStream_t stream);
/// Gives all unused blocks back to the system.
void empty_pinned_cache();

}  // namespace tandem::cuda
