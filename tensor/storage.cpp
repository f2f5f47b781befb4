#include <tandem/tensor/storage.h>

#include <tandem/tensor/backend.h>

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

const Backend& backend(Device device) {
  check(device.is_cpu(), "backend", "{} cannot be used: this build of Tandem has no CUDA backend; use \"cpu\"", device);
  return kCpuBackend;
}

}  // namespace tandem
