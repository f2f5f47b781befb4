#include <tandem/tensor/cuda/device_error.h>

#include <array>
#include <atomic>
#include <mutex>
#include <new>
#include <optional>

namespace tandem::cuda {
namespace {

std::atomic<void (*)(int)> g_hook{nullptr};

struct FirstError {
  std::once_flag once;
  std::atomic<DeviceError*> error{nullptr};
};
std::array<FirstError, kMaxDevices>& first_errors() {
  static auto* const all = new std::array<FirstError, kMaxDevices>();
  return *all;
}

struct Finding {
  RangeCheck check = {};
  std::int64_t number = 0, position = 0;
};

// What is there, which is then forgotten. Of several threads that wait, one has it. A new error is kept when this one
// has been read.
std::optional<Finding> take(DeviceError& error) {
  const std::atomic_ref state(error.state);
  int written = DeviceError::kWritten;
  if (state.load(std::memory_order_relaxed) != written) return {};
  if (!state.compare_exchange_strong(written, DeviceError::kTaken, std::memory_order_acquire)) return {};
  const Finding found{error.check, error.number, error.position};
  state.store(DeviceError::kNone, std::memory_order_release);
  return found;
}

}  // namespace

DeviceError* device_error(Device device) {
  FirstError& first = first_errors()[static_cast<std::size_t>(device.index())];
  std::call_once(first.once, [&] {
    void* memory = nullptr;
    check_status(cudaHostAlloc(&memory, sizeof(DeviceError), cudaHostAllocPortable | cudaHostAllocMapped), "cuda");
    first.error = new (memory) DeviceError();
  });
  return first.error;
}

void set_synchronize_hook(void (*hook)(int device)) { g_hook = hook; }

void throw_device_error(Device device) {
  if (auto* const hook = g_hook.load()) hook(device.index());
  if (const auto found = take(*device_error(device))) fail_range(found->check, found->number, found->position);
}

void throw_errors_of_values(Device device) {
  throw_device_error(device);
  for (int other = 0; other < kMaxDevices; ++other) {
    DeviceError* const error = first_errors()[static_cast<std::size_t>(other)].error;
    const auto found = error == nullptr ? std::nullopt : take(*error);
    if (!found) continue;
    try {
      fail_range(found->check, found->number, found->position);
    } catch (const Error& e) {
      throw Error(fmt::format("{}; found on {}{}", e.what(), Device(DeviceType::cuda, other),
                              found->check.of_labels() ? ", whose rows are counted" : ""));
    }
  }
}

}  // namespace tandem::cuda
