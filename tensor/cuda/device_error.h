// What kernels find wrong in values that only the device sees, such as labels: the first of each device is kept in
// page-locked memory that the kernel writes to, and thrown when the host next waits for the device.
#pragma once
#include <atomic>

#include <tandem/tensor/cuda/launch.h>
#include <tandem/tensor/range_check.h>

namespace tandem::cuda {

/// The place for one error of a device.
struct DeviceError {
  static constexpr int kNone = 0, kTaken = 1, kWritten = 2;
  int state = kNone;
  RangeCheck check = {};
  std::int64_t number = 0, position = 0;
};

/// The device's place. Made when the device is first used, since it cannot be while a graph is captured.
DeviceError* device_error(Device device);
/// Throws what kernels that are done have noted, if anything, and forgets it. Before that it calls the hook, which may
/// throw for reasons of its own.
void throw_device_error(Device device);
/// The same where values are read: they may come from other devices, as in DataParallel, so these are asked, too.
void throw_errors_of_values(Device device);
void set_synchronize_hook(void (*hook)(int device));

/// Called by a kernel: keeps the error unless there is one already.
TANDEM_DEVICE inline void note_error(DeviceError* error, const RangeCheck& check, std::int64_t number,
                                     std::int64_t position) {
#if defined(__CUDACC__)
  if (atomicCAS_system(&error->state, DeviceError::kNone, DeviceError::kTaken) != DeviceError::kNone) return;
#else
  int none = DeviceError::kNone;
  if (!std::atomic_ref(error->state).compare_exchange_strong(none, DeviceError::kTaken)) return;
#endif
  error->check = check;
  error->number = number;
  error->position = position;
#if defined(__CUDACC__)
  __threadfence_system();
  atomicExch_system(&error->state, DeviceError::kWritten);
#else
  std::atomic_ref(error->state).store(DeviceError::kWritten, std::memory_order_release);
#endif
}

}  // namespace tandem::cuda
