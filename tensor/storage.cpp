#include <tandem/tensor/storage.h>

#include <tandem/tensor/backend.h>
#include <tandem/tensor/cpu/allocator.h>
#include <tandem/tensor/cuda/module.h>

namespace tandem {

Storage::Storage(std::size_t bytes, Device device)
    : data_(backend(device).allocate(device, bytes)), bytes_(bytes), device_(device), owned_by_pool_(true) {}

Storage::Storage(void* data, std::size_t bytes, Device device, std::shared_ptr<void> owner)
    : data_(data), bytes_(bytes), device_(device), owner_(std::move(owner)), owned_by_pool_(false) {}

Storage::Storage(std::shared_ptr<Storage> base, Device device)
    : data_(base->data()), bytes_(base->bytes()), device_(device), version_(base->version_), owned_by_pool_(false) {
  owner_ = std::move(base);
}

Storage::~Storage() {
  if (owned_by_pool_) backend(device_).release(device_, data_, bytes_);
}

const Backend& backend(Device device) { return device.is_cpu() ? kCpuBackend : *cuda::module("backend").backend; }

void copy_values(const View& from, const View& to, bool non_blocking) {
  backend(from.device.is_cuda() ? from.device : to.device).copy(from, to, non_blocking);
}

MemoryStats memory_stats(Device device) {
  if (device.is_cuda()) check_exists("memory_stats", device);
  return device.is_cpu() ? cpu::memory_stats(device) : cuda::module("memory_stats").memory_stats(device.index());
}

void reset_peak_memory(Device device) {
  if (device.is_cuda()) check_exists("reset_peak_memory", device);
  if (device.is_cpu()) return cpu::reset_peak_memory(device);
  cuda::module("reset_peak_memory").reset_peak_memory(device.index());
}

void empty_cache() {
  cpu::empty_cache();
  if (cuda::is_available()) cuda::module("empty_cache").empty_cache();
}

}  // namespace tandem
