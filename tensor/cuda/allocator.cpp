#include <tandem/tensor/cuda/allocator.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include <tandem/tensor/cuda/capture.h>
#include <tandem/tensor/cuda/kernels.h>
#include <tandem/tensor/cuda/pinned.h>

namespace tandem::cuda {
namespace {

struct Pool {
  std::once_flag once;
  cudaMemPool_t pool = nullptr;
  std::atomic<std::size_t> in_use{0}, peak{0}, workspaces{0};
};

Pool& pool(int device) {
  static auto* const pools = new std::array<Pool, kMaxDevices>();
  Pool& p = (*pools)[static_cast<std::size_t>(device)];
  std::call_once(p.once, [&] {
    check_status(cudaDeviceGetDefaultMemPool(&p.pool, device), "cuda");
    // Freed memory stays in the pool, so that a step that repeats asks the system for nothing.
    std::uint64_t keep = UINT64_MAX;
    check_status(cudaMemPoolSetAttribute(p.pool, cudaMemPoolAttrReleaseThreshold, &keep), "cuda");
  });
  return p;
}

std::size_t reserved(Pool& p, int device) {
  std::uint64_t bytes = 0;
  check_status(cudaMemPoolGetAttribute(p.pool, cudaMemPoolAttrReservedMemCurrent, &bytes), "cuda");
  return bytes + graph_memory_reserved(device);
}

[[noreturn]] void out_of_memory(Device device, std::size_t bytes, Pool& p) {
  std::size_t free = 0, total = 0;
  (void)cudaMemGetInfo(&free, &total);
  fail("allocate",
       "out of memory on {}: {} bytes were asked for; tensors use {}, the workspaces of products {}, the pool holds "
       "{}, and {} of the device's {} are free; use a smaller batch or model",
       device, bytes, p.in_use.load(), p.workspaces.load(), reserved(p, device.index()), free, total);
}

// Null when the device has no memory left.
void* allocate_in_order(Pool& p, std::size_t bytes, cudaStream_t stream) {
  void* data = nullptr;
  const std::size_t size = std::max<std::size_t>(bytes, 1);
  cudaError_t status = cudaMallocAsync(&data, size, stream);
  if (status == cudaErrorMemoryAllocation) {  // once more, with what other streams have freed
    (void)cudaGetLastError();
    check_status(cudaDeviceSynchronize(), "allocate");
    check_status(cudaMemPoolTrimTo(p.pool, 0), "allocate");
    status = cudaMallocAsync(&data, size, stream);
  }
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return nullptr;
  }
  check_status(status, "allocate");
  return data;
}

}  // namespace

void* allocate(Device device, std::size_t bytes) {
  const cudaStream_t stream = use(device);
  Pool& p = pool(device.index());
  Capture* const capture = current_capture();
  void* const data = capture != nullptr ? capture->memory.allocate(bytes) : allocate_in_order(p, bytes, stream);
  if (data == nullptr) out_of_memory(device, bytes, p);
  const std::size_t now = p.in_use += bytes;
  std::size_t peak = p.peak;
  while (peak < now && !p.peak.compare_exchange_weak(peak, now)) {
  }
  return data;
}

// Called by destructors, also those of static tensors at the end of the program, when CUDA may be gone: no errors.
void release(Device device, void* data, std::size_t bytes) {
  if (forked()) return;
  const bool of_graph = release_graph_memory(data, bytes);
  if (Capture* const capture = current_capture(); capture != nullptr && !of_graph)
    return capture->freed.push_back({device, data, bytes});
  pool(device.index()).in_use -= bytes;
  if (of_graph) return;
  try {
    (void)cudaFreeAsync(data, use(device));
  } catch (const std::exception&) {
    return;
  }
}

void* allocate_workspace(Device device, std::size_t bytes) {
  const cudaStream_t stream = use(device);
  Pool& p = pool(device.index());
  void* const data = allocate_in_order(p, bytes, stream);
  if (data == nullptr) out_of_memory(device, bytes, p);
  p.workspaces += bytes;
  return data;
}

void release_workspace(int device, void* data, std::size_t bytes, cudaStream_t stream) {
  pool(device).workspaces -= bytes;
  (void)cudaFreeAsync(data, stream);
}

MemoryStats memory_stats(int device) {
  use(device);
  Pool& p = pool(device);
  return {.in_use = p.in_use, .peak = p.peak, .reserved = reserved(p, device)};
}

void reset_peak_memory(int device) {
  Pool& p = pool(device);
  p.peak = p.in_use.load();
}

void empty_cache(int device) {
  check_no_capture("empty_cache", "memory cannot be given back while a graph is captured; do it before or after");
  const cudaStream_t stream = use(device);
  check_status(cudaStreamSynchronize(stream), "empty_cache");
  check_status(cudaMemPoolTrimTo(pool(device).pool, 0), "empty_cache");
}

void empty_cache() {
  std::string reason;
  for (int device = device_count(reason); device-- > 0;) empty_cache(device);
  empty_pinned_cache();
}

Scratch::Scratch(Device device, std::size_t bytes) : device_(device), bytes_(bytes), data_(allocate(device, bytes)) {}
Scratch::~Scratch() { release(device_, data_, bytes_); }

}  // namespace tandem::cuda
