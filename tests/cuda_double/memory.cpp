// The calls on memory: allocation at once and in the order of streams, pools, pinned memory, copies. Copies keep the
// promises of "API synchronization behavior" and no more: with pinned memory nothing has happened when they return.
// What it cannot catch: memory that is too slow, and copies that a real device would split.
#include <cstring>
#include <memory>

#include "device_memory.h"
#include "graph.h"
#include "runtime.h"
#include "stream.h"

using namespace cuda_double;

namespace cuda_double {

cudaError_t allocate_now(void** pointer, size_t bytes, Origin origin, const char* name) {
  *pointer = nullptr;
  if (cudaError_t error = forbid_in_capture(nullptr, name)) return error;
  if (bytes == 0) return cudaSuccess;
  std::optional<Block> block = allocate(bytes, current_device(), origin);
  if (!block) return cudaErrorMemoryAllocation;
  DeviceAccess access(block->device);
  poison(*block);
  *pointer = block->begin;
  return cudaSuccess;
}

cudaError_t free_now(void* pointer, const char* name) {
  if (!pointer) return cudaSuccess;
  if (cudaError_t error = forbid_in_capture(nullptr, name)) return error;
  Block block = forget(pointer, name);
  if (block.origin == Origin::pinned) die("{}: {} is pinned memory of the host", name, pointer);
  synchronize_device(block.device);
  release(block);
  return cudaSuccess;
}

}  // namespace cuda_double

namespace {

cudaError_t forbid_captured_allocation(cudaStream_t stream, const char* name) {
  require_explicit(stream, name);
  if (!stream->capture) return cudaSuccess;
  stream->capture->invalidate();
  return reject(cudaErrorStreamCaptureUnsupported,
                "{}: the double has no allocations within graphs; allocate from memory that is kept for the graph",
                name);
}

/// Rows of bytes, from one place to another.
struct Copy {
  void* to = nullptr;
  size_t to_pitch = 0;
  const void* from = nullptr;
  size_t from_pitch = 0, width = 0, rows = 1;

  size_t to_bytes() const { return (rows - 1) * to_pitch + width; }
  size_t from_bytes() const { return (rows - 1) * from_pitch + width; }
  void run() const {
    for (size_t row = 0; row < rows; ++row)
      std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  }
};

struct Place {
  int device = -1;  // -1: of the host
  bool pageable = true;
};

Place place_of(const void* pointer, size_t bytes, const char* name) {
  std::optional<Block> block = find_range(pointer, bytes, name);
  if (!block) return {};
  return {block->origin == Origin::pinned ? -1 : block->device, false};
}

cudaError_t check_kind(cudaMemcpyKind kind, int to, int from, const char* name) {
  cudaMemcpyKind is = to >= 0 ? (from >= 0 ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
                              : (from >= 0 ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost);
  if (kind == cudaMemcpyDefault || kind == is) return cudaSuccess;
  return reject(cudaErrorInvalidValue, "{}: the kind is {}, but the pointers are of kind {}", name, int(kind), int(is));
}

cudaError_t copy_async(const Copy& copy, cudaMemcpyKind kind, cudaStream_t stream, const char* name) {
  require_explicit(stream, name);
  if (copy.width == 0 || copy.rows == 0) return cudaSuccess;
  Place to = place_of(copy.to, copy.to_bytes(), name), from = place_of(copy.from, copy.from_bytes(), name);
  if (cudaError_t error = check_kind(kind, to.device, from.device, name)) return error;
  bool pageable = to.pageable || from.pageable;
  if (pageable && stream->capture) {
    stream->capture->invalidate();
    return reject(cudaErrorStreamCaptureUnsupported, "{}: pageable memory in a capture; use pinned memory", name);
  }
  int first = to.device, second = from.device;
  if (from.pageable && to.device >= 0) {  // The source may change as soon as the call returns: it is staged.
    std::unique_ptr<char[]> staged(new char[copy.from_bytes()]);
    std::memcpy(staged.get(), copy.from, copy.from_bytes());
    return enqueue_on(first, stream, [copy, staged = std::move(staged)] {
      Copy from_stage = copy;
      from_stage.from = staged.get();
      from_stage.run();
    });
  }
  cudaError_t error = enqueue_on(first, stream, [copy, second] {
    DeviceAccess access(second);
    copy.run();
  });
  bool of_host = to.device < 0 && from.device < 0;
  if (error == cudaSuccess && (to.pageable || of_host)) stream->worker->synchronize();
  return error;
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return call([&] { return allocate_now(pointer, bytes, Origin::direct, "cudaMalloc"); });
}

cudaError_t cudaFree(void* pointer) {
  return call([&] { return free_now(pointer, "cudaFree"); });
}

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t stream) {
  return call([&] {
    *pointer = nullptr;
    if (cudaError_t error = forbid_captured_allocation(stream, "cudaMallocAsync")) return error;
    if (bytes == 0) return cudaErrorInvalidValue;
    std::optional<Block> block = allocate(bytes, stream->device, Origin::pool);
    if (!block) return cudaErrorMemoryAllocation;
    *pointer = block->begin;
    return enqueue(stream, [block = *block] { poison(block); });  // the memory exists where the stream has come here
  });
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return call([&] {
    if (!pointer) return cudaSuccess;
    if (cudaError_t error = forbid_captured_allocation(stream, "cudaFreeAsync")) return error;
    Block block = forget(pointer, "cudaFreeAsync");
    if (block.origin != Origin::pool) die("cudaFreeAsync: {} is not from cudaMallocAsync", pointer);
    stream->worker->push([block] { release(block); });
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return call([&] {
    static auto* pools = new CUmemPoolHandle_st[static_cast<size_t>(device_count())];
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    pools[device].device = device;
    *pool = &pools[device];
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  return call([&] {
    bool is_zero = attribute >= cudaMemPoolAttrReleaseThreshold && *static_cast<uint64_t*>(value) == 0;
    switch (attribute) {
      case cudaMemPoolAttrReleaseThreshold:
        set_release_threshold(pool->device, *static_cast<uint64_t*>(value));
        return cudaSuccess;
      case cudaMemPoolAttrReservedMemHigh:
        if (is_zero) reset_reserved_high(pool->device);
        return is_zero ? cudaSuccess : cudaErrorInvalidValue;
      case cudaMemPoolAttrUsedMemHigh:
        if (is_zero) reset_used_high(pool->device);
        return is_zero ? cudaSuccess : cudaErrorInvalidValue;
      case cudaMemPoolReuseFollowEventDependencies:
      case cudaMemPoolReuseAllowOpportunistic:
      case cudaMemPoolReuseAllowInternalDependencies:
        return cudaSuccess;
      default:
        return cudaErrorInvalidValue;
    }
  });
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  return call([&] {
    MemoryUse use = memory_use(pool->device);
    auto* number = static_cast<uint64_t*>(value);
    switch (attribute) {
      case cudaMemPoolAttrReleaseThreshold:
        *number = use.release_threshold;
        return cudaSuccess;
      case cudaMemPoolAttrReservedMemCurrent:
        *number = use.reserved;
        return cudaSuccess;
      case cudaMemPoolAttrReservedMemHigh:
        *number = use.reserved_high;
        return cudaSuccess;
      case cudaMemPoolAttrUsedMemCurrent:
        *number = use.used;
        return cudaSuccess;
      case cudaMemPoolAttrUsedMemHigh:
        *number = use.used_high;
        return cudaSuccess;
      default:
        return cudaErrorInvalidValue;
    }
  });
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep) {
  return call([&] {
    trim_pool(pool->device, keep);
    return cudaSuccess;
  });
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return call([&] {
    MemoryUse use = memory_use(current_device());
    *total = memory_limit();
    *free = *total - use.direct - use.reserved;
    return cudaSuccess;
  });
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  return call([&] {
    *pointer = nullptr;
    if (flags & ~(cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined))
      return cudaErrorInvalidValue;
    if (cudaError_t error = forbid_in_capture(nullptr, "cudaHostAlloc")) return error;
    if (bytes == 0) return cudaSuccess;
    std::optional<Block> block = allocate(bytes, current_device(), Origin::pinned);
    poison(*block);
    *pointer = block->begin;
    return cudaSuccess;
  });
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, cudaHostAllocDefault); }

cudaError_t cudaFreeHost(void* pointer) {
  return call([&] {
    if (!pointer) return cudaSuccess;
    if (cudaError_t error = forbid_in_capture(nullptr, "cudaFreeHost")) return error;
    Block block = forget(pointer, "cudaFreeHost");
    if (block.origin != Origin::pinned) die("cudaFreeHost: {} is memory of a device", pointer);
    release(block);
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return call([&] {
    std::optional<Block> block = find(pointer);
    bool pinned = block && block->origin == Origin::pinned;
    *attributes = {};
    attributes->type = !block ? cudaMemoryTypeUnregistered : pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = block ? block->device : cudaInvalidDeviceId;
    attributes->devicePointer = block ? const_cast<void*>(pointer) : nullptr;
    attributes->hostPointer = !block || pinned ? const_cast<void*>(pointer) : nullptr;
    return cudaSuccess;
  });
}

/// The legacy default stream: it is ordered with no non-blocking stream, and with nothing that Tandem makes.
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return call([&] {
    if (cudaError_t error = forbid_in_capture(nullptr, "cudaMemcpy")) return error;
    Place to_place = place_of(to, bytes, "cudaMemcpy"), from_place = place_of(from, bytes, "cudaMemcpy");
    if (cudaError_t error = check_kind(kind, to_place.device, from_place.device, "cudaMemcpy")) return error;
    DeviceAccess to_access(to_place.device), from_access(from_place.device);
    std::memcpy(to, from, bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return call([&] { return copy_async({to, bytes, from, bytes, bytes}, kind, stream, "cudaMemcpyAsync"); });
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  return call([&] {
    if (width > to_pitch || width > from_pitch) return cudaErrorInvalidValue;
    return copy_async({to, to_pitch, from, from_pitch, width, rows}, kind, stream, "cudaMemcpy2DAsync");
  });
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                                cudaStream_t stream) {
  return call([&] {
    require_range(to, bytes, to_device, "cudaMemcpyPeerAsync");
    require_range(from, bytes, from_device, "cudaMemcpyPeerAsync");
    return copy_async({to, bytes, from, bytes, bytes}, cudaMemcpyDeviceToDevice, stream, "cudaMemcpyPeerAsync");
  });
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return call([&] {
    require_explicit(stream, "cudaMemsetAsync");
    require_range(to, bytes, stream->device, "cudaMemsetAsync");
    return enqueue(stream, [=] { std::memset(to, value, bytes); });
  });
}

}  // extern "C"
