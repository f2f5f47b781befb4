// The memory of the devices, and the pinned memory of the host: who owns which bytes. Host threads alone look things
// up.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <optional>

struct CUmemPoolHandle_st {
  int device = 0;
};

namespace cuda_double {

enum class Origin { direct, pool, nccl, pinned };

struct Block {
  char* begin = nullptr;
  size_t bytes = 0;
  int device = 0;
  Origin origin = Origin::direct;
};

/// Bytes that a device has.
size_t memory_limit();

/// Memory of a device, or nothing where it has not enough left. Not yet filled.
std::optional<Block> allocate(size_t bytes, int device, Origin origin);
/// Fills with NaN (all bits set): nothing may rely on what fresh memory holds. Device memory needs a DeviceAccess.
void poison(const Block& block);
/// Forgets a block, which then is no longer found; its bytes count as free. Dies where `pointer` is not its begin.
Block forget(void* pointer, const char* call);
/// Gives the bytes back: from now on, under AddressSanitizer, a use is an error.
void release(const Block& block);

/// The block that holds a pointer.
std::optional<Block> find(const void* pointer);
/// Like find, and dies where the range leaves the block.
std::optional<Block> find_range(const void* pointer, size_t bytes, const char* what);
/// Dies unless the range lies within one allocation of this device.
void require_range(const void* pointer, size_t bytes, int device, const char* what);

/// cudaMalloc and cudaFree, with the name that errors carry.
cudaError_t allocate_now(void** pointer, size_t bytes, Origin origin, const char* name);
cudaError_t free_now(void* pointer, const char* name);

/// How much memory a device lends out.
struct MemoryUse {
  size_t direct = 0;  // by cudaMalloc and ncclMemAlloc
  size_t used = 0, used_high = 0, reserved = 0, reserved_high = 0;
  uint64_t release_threshold = 0;
};
MemoryUse memory_use(int device);
/// What a pool gives back to the device when the host synchronises, or all but `keep` bytes.
void trim_pool(int device);
void trim_pool(int device, size_t keep);
void set_release_threshold(int device, uint64_t bytes);
void reset_used_high(int device);
void reset_reserved_high(int device);

/// False where it was enabled before.
bool enable_peer(int device, int peer);

/// Lets the calling thread use the memory of a device (and of its peers) while it lives; -1 is none. Only matters with
/// TANDEM_CUDA_DOUBLE_PROTECT=1, where device memory cannot be read or written otherwise.
class DeviceAccess {
 public:
  explicit DeviceAccess(int device);
  ~DeviceAccess();
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;

 private:
  uint64_t devices_ = 0;
};

}  // namespace cuda_double
