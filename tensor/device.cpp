#include <tandem/tensor/device.h>

#include <atomic>
#include <charconv>
#include <cstdlib>

#include <tandem/tensor/cuda.h>
#include <tandem/tensor/cuda/module.h>

namespace tandem {
namespace {

constexpr int kMaxCpuDevices = 64;

int parse_index(std::string_view digits) {
  int index = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
  return error == std::errc() && end == digits.data() + digits.size() && index < 1024 ? index : -1;
}

int initial_cpu_devices() {
  const char* text = std::getenv("TANDEM_CPU_DEVICES");
  if (text == nullptr || *text == '\0') return 1;
  const int count = parse_index(text);
  check(count >= 1 && count <= kMaxCpuDevices, "TANDEM_CPU_DEVICES", "is '{}'; set it to a number from 1 to {}", text,
        kMaxCpuDevices);
  return count;
}

std::atomic<int>& cpu_devices() {
  static std::atomic<int> count{initial_cpu_devices()};
  return count;
}

}  // namespace

Device::Device(std::string_view text) {
  const auto colon = text.find(':');
  const std::string_view type = text.substr(0, colon);
  int index = 0;
  if (colon != std::string_view::npos) index = parse_index(text.substr(colon + 1));
  check((type == "cpu" || type == "cuda") && index >= 0, "Device",
        "'{}' is not a device; write \"cpu\", \"cpu:1\", \"cuda\" or \"cuda:0\"", text);
  type_ = type == "cpu" ? DeviceType::cpu : DeviceType::cuda;
  index_ = index;
}

DeviceIds::DeviceIds(std::initializer_list<DeviceId> ids) : ids_(ids) {}
DeviceIds::DeviceIds(const std::vector<Device>& devices) : ids_(devices.begin(), devices.end()) {}

int device_count(DeviceType type) { return type == DeviceType::cpu ? cpu_devices().load() : cuda::device_count(); }

void set_cpu_device_count(int count) {
  check(count >= 1 && count <= kMaxCpuDevices, "set_cpu_device_count", "{} devices were asked for; give 1 to {}", count,
        kMaxCpuDevices);
  cpu_devices() = count;
}

void check_exists(std::string_view op, Device device) {
  const int count = device.is_cpu() ? cpu_devices().load() : cuda::existing_devices();
  check(device.index() >= 0, op, "{} does not exist: a device number starts at 0", device);
  if (device.index() < count) return;
  if (device.is_cuda() && count == 0)
    fail(op, "{} does not exist: {}; use \"cpu\"", device, cuda::unavailable_reason());
  if (device.is_cuda()) fail(op, "{} does not exist: CUDA devices are cuda:0 to cuda:{}", device, count - 1);
  fail(op,
       "{} does not exist: there are {} virtual CPU devices; set TANDEM_CPU_DEVICES or call set_cpu_device_count({})",
       device, count, device.index() + 1);
}

}  // namespace tandem
