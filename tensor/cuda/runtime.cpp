#include <tandem/tensor/cuda/runtime.h>

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>

#include <tandem/tensor/cuda/capture.h>
#include <tandem/tensor/cuda/device_error.h>

namespace tandem::cuda {
namespace {

std::atomic<bool> g_forked{false};
std::atomic<cudaError_t> g_fault{cudaSuccess};  // the first that is for good

// Whether CUDA answers every later call of the process with an error, too.
bool for_good(cudaError_t status) {
  switch (status) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
      return true;
    default:
      return false;
  }
}

void note_fault(cudaError_t status) {
  cudaError_t none = cudaSuccess;
  if (for_good(status)) g_fault.compare_exchange_strong(none, status);
}

// Why devices that exist cannot be used; empty where they can.
std::string obstacle() {
  if (forked())
    return "this process was forked after CUDA was used, which CUDA does not allow; start it by exec (spawn does)";
  if (const cudaError_t fault = g_fault; fault != cudaSuccess)
    return fmt::format(
        "CUDA failed in this process before: {} ({}), and works again only in a new one; start the "
        "program anew, from its last checkpoint",
        cudaGetErrorString(fault), cudaGetErrorName(fault));
  return {};
}

struct MainStream {
  std::once_flag once;
  cudaStream_t stream = nullptr;
};
// Streams live as long as the process: tensors of static lifetime are freed on them.
MainStream& main_stream(int device) {
  static auto* const streams = new std::array<MainStream, kMaxDevices>();
  return (*streams)[static_cast<std::size_t>(device)];
}

thread_local int t_scope_device = -1;
thread_local cudaStream_t t_scope_stream = nullptr;

void watch_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { g_forked = true; });
  (void)registered;
}

}  // namespace

void check_status(cudaError_t status, std::string_view op) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // clears what is not for good
  note_fault(status);
  fail(op, "CUDA failed: {} ({}); an error of a kernel may come from an earlier operation", cudaGetErrorString(status),
       cudaGetErrorName(status));
}

bool forked() { return g_forked; }

int device_count(std::string& reason) {
  if (reason = obstacle(); !reason.empty()) return 0;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) {
    watch_forks();
    return count < kMaxDevices ? count : kMaxDevices;
  }
  (void)cudaGetLastError();
  note_fault(status);
  if (reason = obstacle(); !reason.empty()) return 0;
  int driver = 0, runtime = 0;
  (void)cudaDriverGetVersion(&driver);
  (void)cudaRuntimeGetVersion(&runtime);
  const auto text = [](int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); };
  if (status == cudaErrorInsufficientDriver && driver == 0)
    reason = "no NVIDIA driver is installed";
  else if (status == cudaErrorInsufficientDriver)
    reason =
        fmt::format("the NVIDIA driver is too old: it serves CUDA {}, and Tandem was built with CUDA {}; update it",
                    text(driver), text(runtime));
  else if (status == cudaErrorNoDevice || status == cudaSuccess)
    reason = std::getenv("CUDA_VISIBLE_DEVICES") == nullptr
                 ? "the NVIDIA driver finds no device"
                 : fmt::format("the NVIDIA driver finds no device (CUDA_VISIBLE_DEVICES is '{}')",
                               std::getenv("CUDA_VISIBLE_DEVICES"));
  else
    reason = fmt::format("CUDA failed: {} ({})", cudaGetErrorString(status), cudaGetErrorName(status));
  return 0;
}

cudaStream_t create_stream(bool high_priority) {
  int lowest = 0, highest = 0;
  cudaStream_t stream = nullptr;
  check_status(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cuda");
  check_status(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, high_priority ? highest : lowest), "cuda");
  return stream;
}

cudaStream_t use(Device device) {
  if (forked() || g_fault != cudaSuccess) fail("cuda", "{} cannot be used: {}", device, obstacle());
  if (const Capture* const capture = current_capture())
    check(capture->device == device, "Graph",
          "there is work for {} while a graph of {} is captured; a graph records one device: keep all tensors of the "
          "step there",
          device, capture->device);
  check_status(cudaSetDevice(device.index()), "cuda");
  if (t_scope_device == device.index()) return t_scope_stream;
  MainStream& main = main_stream(device.index());
  std::call_once(main.once, [&] {
    main.stream = create_stream(false);
    (void)device_error(device);
  });
  return main.stream;
}

std::pair<int, cudaStream_t> exchange_stream(int device, cudaStream_t stream) {
  return {std::exchange(t_scope_device, device), std::exchange(t_scope_stream, stream)};
}

StreamScope::StreamScope(int device, cudaStream_t stream)
    : previous_device_(t_scope_device), previous_(t_scope_stream) {
  exchange_stream(device, stream);
}
StreamScope::~StreamScope() { exchange_stream(previous_device_, previous_); }

Event::~Event() {
  if (event_ != nullptr && !forked()) (void)cudaEventDestroy(event_);
}
void Event::record(cudaStream_t stream) {
  if (event_ == nullptr) check_status(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cuda");
  check_status(cudaEventRecord(event_, stream), "cuda");
}
void Event::wait(cudaStream_t stream) const {
  if (event_ != nullptr) check_status(cudaStreamWaitEvent(stream, event_, 0), "cuda");
}
void Event::synchronize() const {
  if (event_ != nullptr) check_status(cudaEventSynchronize(event_), "cuda");
}
bool Event::done() const { return event_ == nullptr || is_done(event_); }

bool is_done(cudaEvent_t event) {
  const cudaError_t status = cudaEventQuery(event);
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  check_status(status, "cuda");
  return true;
}

}  // namespace tandem::cuda
