// CUDA devices: whether there are any, what they are, their memory, and waiting for them. The backend is a module,
// libtandem_cuda.so, that is opened when a CUDA device is first asked for.
#pragma once
#include <cstddef>
#include <string>

#include <tandem/tensor/storage.h>
#include <tandem/tensor/tensor.h>

namespace tandem::cuda {

/// What a CUDA device is.
struct DeviceProperties {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  std::size_t total_memory = 0;  // in bytes
  std::size_t free_memory = 0;   // in bytes, at the time of the call
};

/// Why this process has no CUDA device: no module, no driver, one that is too old, no device. Empty when it has one.
std::string unavailable_reason();
/// Throws Error when the device does not exist.
DeviceProperties properties(Device device = DeviceType::cuda);
/// Waits until all work given to the device so far is done. An operation that failed there is an Error here.
void synchronize(Device device = DeviceType::cuda);

/// A copy of a CPU tensor in page-locked memory, from which .to(device, true) copies while the program goes on. The
/// tensor itself when it lies in such memory already; without gradient.
Tensor pin_memory(const Tensor& x);
/// Whether the tensor lies in page-locked memory.
bool is_pinned(const Tensor& x);

/// Lets products of float32 matrices round their operands to TF32 (10 bits of mantissa), which is several times faster.
/// Off until it is called; for all devices and threads. Throws Error where CUDA cannot be used.
void set_allow_tf32(bool allow);
/// Whether they may.
bool allow_tf32();

}  // namespace tandem::cuda
