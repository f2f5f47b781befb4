// The CUDA runtime as the backend uses it: errors, the current device, and the stream that work goes to.
#pragma once
#include <cuda_runtime_api.h>

#include <string>
#include <string_view>
#include <utility>

#include <tandem/tensor/device.h>

namespace tandem::cuda {

inline constexpr int kMaxDevices = 64;

/// Throws Error with CUDA's name and words for `status` unless it is success.
void check_status(cudaError_t status, std::string_view op);

/// Makes the device current for the calling thread and returns the thread's stream there: the device's main stream,
/// or that of the innermost StreamScope. Error in a process that was forked after CUDA was used.
cudaStream_t use(Device device);
inline cudaStream_t use(int device) { return use(Device(DeviceType::cuda, device)); }

/// The calling thread's work on a device goes to another stream until this is destroyed.
class StreamScope {
 public:
  StreamScope(int device, cudaStream_t stream);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  int previous_device_;
  cudaStream_t previous_;
};

/// The same without an end: returns what was there.
std::pair<int, cudaStream_t> exchange_stream(int device, cudaStream_t stream);

/// A stream of the current device that no default stream waits for, of the lowest priority or the highest.
cudaStream_t create_stream(bool high_priority);
/// Whether all that the event stands for is done.
bool is_done(cudaEvent_t event);

/// An event without timing, which orders streams.
class Event {
 public:
  Event() = default;
  ~Event();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  /// Stands for all work given to `stream` so far, whose device is current.
  void record(cudaStream_t stream);
  /// `stream`, whose device is current, does later work only after this.
  void wait(cudaStream_t stream) const;
  /// Waits until the work has been done.
  void synchronize() const;
  /// Whether the work has been done.
  bool done() const;
  bool recorded() const { return event_ != nullptr; }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Number of devices; 0 with the reason.
int device_count(std::string& reason);
/// True in a process that was forked after this one used CUDA, where no call can be made.
bool forked();

}  // namespace tandem::cuda
