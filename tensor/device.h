// Devices: CUDA devices, and virtual CPU devices cpu:0 .. cpu:k-1, each with its share of the threads.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include <tandem/tensor/error.h>

namespace tandem {

/// The kinds of devices.
enum class DeviceType : std::uint8_t { cpu, cuda };

/// A device: "cpu" (the same as "cpu:0"), "cpu:1", "cuda:0", ...
class Device {
 public:
  constexpr Device() = default;
  constexpr Device(DeviceType type, int index = 0) : type_(type), index_(index) {}
  /// Reads "cpu", "cpu:1", "cuda" or "cuda:0"; throws Error on anything else. Whether the device exists is checked
  /// when something is put on it.
  Device(std::string_view text);
  Device(const char* text) : Device(std::string_view(text)) {}
  Device(const std::string& text) : Device(std::string_view(text)) {}
  constexpr DeviceType type() const { return type_; }
  constexpr int index() const { return index_; }
  constexpr bool is_cpu() const { return type_ == DeviceType::cpu; }
  constexpr bool is_cuda() const { return type_ == DeviceType::cuda; }
  std::string str() const { return fmt::format("{}:{}", is_cpu() ? "cpu" : "cuda", index_); }
  friend constexpr bool operator==(const Device&, const Device&) = default;

 private:
  DeviceType type_ = DeviceType::cpu;
  int index_ = 0;
};

/// One entry of a device list: a device, or an index whose type is taken from the model it is used with.
class DeviceId {
 public:
  DeviceId(int index) : index_(index) {}
  DeviceId(const char* device) : device_(device), has_type_(true) {}
  DeviceId(const std::string& device) : device_(device), has_type_(true) {}
  DeviceId(Device device) : device_(device), has_type_(true) {}
  /// True when this is the index -1, which stands for "not given".
  bool is_default() const { return !has_type_ && index_ < 0; }
  /// The device; `type` completes a bare index.
  Device resolve(DeviceType type) const { return has_type_ ? device_ : Device(type, index_); }

 private:
  Device device_;
  int index_ = 0;
  bool has_type_ = false;
};

/// A list of devices: {0, 1} or {"cpu:0", "cpu:1"}. A type of its own, so that a pair of strings is never taken for
/// a pair of iterators.
class DeviceIds {
 public:
  DeviceIds() = default;
  DeviceIds(std::initializer_list<DeviceId> ids);
  DeviceIds(const std::vector<Device>& devices);
  bool empty() const { return ids_.empty(); }
  std::size_t size() const { return ids_.size(); }
  auto begin() const { return ids_.begin(); }
  auto end() const { return ids_.end(); }

 private:
  std::vector<DeviceId> ids_;
};

/// Number of devices of a type. CPU devices are virtual: TANDEM_CPU_DEVICES or set_cpu_device_count says how many
/// (default 1).
int device_count(DeviceType type);
/// Sets the number of virtual CPU devices, 1 to 64. Lower it only when no tensor on the devices that go away is used
/// any more: an operation on one is an error.
void set_cpu_device_count(int count);
/// Throws Error unless the device exists.
void check_exists(std::string_view op, Device device);

namespace cuda {
/// Whether a CUDA device can be used by this process.
bool is_available();
/// Number of usable CUDA devices, 0 without a driver.
int device_count();
}  // namespace cuda

}  // namespace tandem

template <>
struct fmt::formatter<tandem::Device> : tandem::StrFormatter<tandem::Device> {};
