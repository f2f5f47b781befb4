// Opens the module that knows CUDA when a CUDA device is first asked for, so that the library itself needs none.
#include <tandem/tensor/cuda.h>

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>

#include <fmt/format.h>

#include <tandem/tensor/create.h>
#include <tandem/tensor/cuda/module.h>
#include <tandem/tensor/open_module.h>

namespace tandem::cuda {
namespace {

struct Opened {
  const Module* module = nullptr;
  std::string reason;  // why there is none
};

// Without a driver there is no device, and no need to open the module, which takes a third of a second and 200 MB.
bool has_driver() {
  static const bool found = [] {
    const char* const named = std::getenv(kModuleVariable);
    return (named != nullptr && *named != '\0') || dlopen("libcuda.so.1", RTLD_LAZY) != nullptr;
  }();
  return found;
}

const Host kHost = {.cpu = &kCpuBackend, .repeat_draw = repeat_draw};

Opened open_table() {
  std::string reason;
  void* const entry = open_module(kModule, kModuleVariable, kEntry, reason);
  if (entry == nullptr)
    return {nullptr, fmt::format("Tandem was built without CUDA, or its module cannot be opened: {}", reason)};
  return {reinterpret_cast<Entry*>(entry)(kHost), {}};
}

}  // namespace

const Module* find_module(std::string& reason) {
  static const Opened opened = open_table();
  reason = opened.reason;
  return opened.module;
}

const Module& module(std::string_view op) {
  std::string reason;
  const Module* const found = find_module(reason);
  check(found != nullptr, op, "CUDA cannot be used: {}; use \"cpu\"", reason);
  return *found;
}

namespace {

std::atomic<int> g_known{0};  // number of devices, when there have been some

}  // namespace

int device_count() {
  if (!has_driver()) return 0;
  std::string reason;
  const Module* const found = find_module(reason);
  const int count = found == nullptr ? 0 : found->device_count(reason);
  if (count > 0) g_known = count;
  return count;
}

int existing_devices() {
  const int known = g_known;
  return known > 0 ? known : device_count();
}

bool is_available() { return device_count() > 0; }

std::string unavailable_reason() {
  std::string reason;
  const Module* const found = find_module(reason);
  if (found != nullptr && found->device_count(reason) > 0) return {};
  return reason;
}

namespace {

int checked_index(std::string_view op, Device device) {
  check(device.is_cuda(), op, "{} is no CUDA device; give \"cuda:0\" or another", device);
  check_exists(op, device);
  return device.index();
}

}  // namespace

DeviceProperties properties(Device device) {
  const int index = checked_index("properties", device);
  return module("properties").properties(index);
}

void synchronize(Device device) {
  const int index = checked_index("synchronize", device);
  module("synchronize").synchronize(index);
}

bool is_pinned(const Tensor& x) {
  return x.device().is_cpu() && x.numel() > 0 && is_available() && module("is_pinned").is_pinned(x.raw().data);
}

void set_allow_tf32(bool allow) {
  if (!is_available()) fail("set_allow_tf32", "CUDA cannot be used: {}", unavailable_reason());
  module("set_allow_tf32").set_allow_tf32(allow);
}

bool allow_tf32() {
  std::string reason;
  const Module* const found = find_module(reason);
  return found != nullptr && found->allow_tf32();
}

Tensor pin_memory(const Tensor& x) {
  check(x.device().is_cpu(), "pin_memory", "the tensor is on {}; only tensors on the CPU can be page-locked",
        x.device());
  if (!is_available())
    fail("pin_memory", "page-locked memory is CUDA's, which cannot be used: {}", unavailable_reason());
  if (is_pinned(x)) return x;
  const auto bytes = static_cast<std::size_t>(x.numel()) * size_of(x.dtype());
  const Module& m = module("pin_memory");
  std::shared_ptr<void> memory(m.allocate_pinned(bytes), m.release_pinned);
  void* const data = memory.get();
  auto storage = std::make_shared<Storage>(data, bytes, x.device(), std::move(memory));
  Tensor y = make_view(std::move(storage), 0, x.shape(), contiguous_strides(x.shape()), x.dtype());
  copy_values(x.raw(), y.raw_for_write());
  return y;
}

}  // namespace tandem::cuda
