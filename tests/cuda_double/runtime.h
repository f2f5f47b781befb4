// What every call into the double shares: the variables, the current device, the errors of a thread and of the process.
// Variables, all beginning with TANDEM_CUDA_DOUBLE_:
//   DEVICES   how many (2); 0 is a driver without a device, `nodriver` a machine without one
//   MEMORY    bytes of a device (1 GiB)
//   PROTECT   1: the host cannot touch device memory, except while work runs on that device
//   DELAY     a seed: random short pauses before operations
//   FAULT     n: the n-th piece of work fails by an illegal address, and the device is lost
//   LT_REFUSE `epilogues`: cuBLASLt supports none
//   DROP      `records`, `waits`, `synchronises` or `queries` (of events, of streams), or one of them with `:n`: all
//             such calls, or the n-th, succeed and do nothing (a query: "done"), as if the program had forgotten them
#pragma once
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstdio>
#include <string>

namespace cuda_double {

/// Ends the process: for misuse that real CUDA answers with silent corruption rather than with an error.
[[noreturn]] void die(const std::string& text);
template <class... A>
[[noreturn]] void die(fmt::format_string<A...> format, A&&... args) {
  die(fmt::format(format, std::forward<A>(args)...));
}

/// Says on stderr why a call fails, and returns its error.
template <class Error, class... A>
Error reject(Error error, fmt::format_string<A...> format, A&&... args) {
  fmt::print(stderr, "cuda double: {}\n", fmt::format(format, std::forward<A>(args)...));
  return error;
}

/// The value of a variable, or what stands for it.
std::string variable(const char* name, const char* otherwise);

int device_count();    // 0 without a driver
int current_device();  // of the calling thread
void set_current_device(int device);

/// Success, or why no call can work: no driver, no device, a fork after the first call, or a lost device.
cudaError_t availability();
/// Makes every later call fail, as a fault on a real device does.
void lose_device(cudaError_t error);
/// Keeps an error for cudaGetLastError of this thread.
cudaError_t remember(cudaError_t error);

/// What TANDEM_CUDA_DOUBLE_DROP can drop.
enum class Order { record, wait, synchronise, query };
/// Whether the call that asks is to be dropped.
bool dropped(Order kind);

/// The frame of each function of the runtime that returns an error.
template <class F>
cudaError_t call(F&& body) {
  cudaError_t error = availability();
  if (error == cudaSuccess) error = body();
  if (error == cudaSuccess) error = availability();  // a fault may have come while the call waited
  return remember(error);
}

/// Makes a device current for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) : before_(current_device()) { set_current_device(device); }
  ~DeviceScope() { set_current_device(before_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_;
};

}  // namespace cuda_double
