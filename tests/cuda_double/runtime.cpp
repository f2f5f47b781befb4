// Devices and errors of the CUDA runtime, modelled after what the real one returns. The values of the properties are
// plausible and mean nothing. A lost device is lost for the whole process, and so are all others.
#include "runtime.h"

#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "device_memory.h"

namespace cuda_double {
namespace {

thread_local int thread_device = 0;
thread_local cudaError_t thread_error = cudaSuccess;
std::atomic<cudaError_t> lost{cudaSuccess};
std::atomic<bool> forked{false};

/// TANDEM_CUDA_DOUBLE_DEVICES is a number, "nodriver", or "olddriver": one that is older than the runtime.
int driver_version() {
  static const std::string devices = variable("TANDEM_CUDA_DOUBLE_DEVICES", "2");
  return devices == "nodriver" ? 0 : devices == "olddriver" ? 11040 : CUDART_VERSION;
}
bool has_driver() { return driver_version() >= CUDART_VERSION; }

struct ErrorText {
  cudaError_t error;
  const char* name;
  const char* text;
};

#define ERROR_TEXT(error, text) \
  { error, #error, text }
constexpr ErrorText kErrors[] = {
    ERROR_TEXT(cudaSuccess, "no error"),
    ERROR_TEXT(cudaErrorInvalidValue, "invalid argument"),
    ERROR_TEXT(cudaErrorMemoryAllocation, "out of memory"),
    ERROR_TEXT(cudaErrorInitializationError, "initialization error"),
    ERROR_TEXT(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"),
    ERROR_TEXT(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR_TEXT(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR_TEXT(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    ERROR_TEXT(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR_TEXT(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    ERROR_TEXT(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    ERROR_TEXT(cudaErrorNotReady, "device not ready"),
    ERROR_TEXT(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR_TEXT(cudaErrorLaunchFailure, "unspecified launch failure"),
    ERROR_TEXT(cudaErrorNotSupported, "operation not supported"),
    ERROR_TEXT(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    ERROR_TEXT(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    ERROR_TEXT(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences"),
    ERROR_TEXT(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    ERROR_TEXT(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    ERROR_TEXT(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    ERROR_TEXT(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"),
    ERROR_TEXT(cudaErrorStreamCaptureWrongThread, "attempt to terminate a thread-local capture from another thread"),
};
#undef ERROR_TEXT

const ErrorText& describe(cudaError_t error) {
  static constexpr ErrorText kUnknown = {cudaErrorUnknown, "unrecognized error code", "unrecognized error code"};
  for (const ErrorText& known : kErrors)
    if (known.error == error) return known;
  return kUnknown;
}

}  // namespace

void die(const std::string& text) {
  fmt::print(stderr, "cuda double: {}\n", text);
  std::abort();
}

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}

int device_count() {
  static const int count = has_driver() ? std::atoi(variable("TANDEM_CUDA_DOUBLE_DEVICES", "2").c_str()) : 0;
  return count;
}

int current_device() { return thread_device; }
void set_current_device(int device) { thread_device = device; }

cudaError_t availability() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); }); });
  if (!has_driver()) return cudaErrorInsufficientDriver;
  if (device_count() == 0) return cudaErrorNoDevice;
  if (forked.load(std::memory_order_relaxed)) return cudaErrorInitializationError;
  return lost.load(std::memory_order_relaxed);
}

void lose_device(cudaError_t error) { lost.store(error, std::memory_order_relaxed); }

bool dropped(Order kind) {
  struct Drop {
    Order kind = {};
    long only = 0;  // of such calls that one; 0: all
  };
  static const std::optional<Drop> drop = []() -> std::optional<Drop> {
    const std::string text = variable("TANDEM_CUDA_DOUBLE_DROP", "");
    if (text.empty()) return {};
    const size_t colon = std::min(text.find(':'), text.size());
    const long only = colon < text.size() ? std::atol(text.c_str() + colon + 1) : 0;
    for (auto [name, is] : {std::pair{"records", Order::record}, std::pair{"waits", Order::wait},
                            std::pair{"synchronises", Order::synchronise}, std::pair{"queries", Order::query}})
      if (text.compare(0, colon, name) == 0 && only >= (colon < text.size() ? 1 : 0)) return Drop{is, only};
    die("TANDEM_CUDA_DOUBLE_DROP is '{}', which is not known", text);
  }();
  static std::atomic<long> count{0};
  if (!drop || drop->kind != kind) return false;
  return drop->only == 0 || count.fetch_add(1, std::memory_order_relaxed) + 1 == drop->only;
}

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) thread_error = error;
  return error;
}

}  // namespace cuda_double

using namespace cuda_double;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  return call([&] {
    *count = device_count();
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return call([&] {
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    set_current_device(device);
    return cudaSuccess;
  });
}

cudaError_t cudaGetDevice(int* device) {
  return call([&] {
    *device = current_device();
    return cudaSuccess;
  });
}

cudaError_t cudaGetLastError() {
  cudaError_t error = std::exchange(thread_error, cudaSuccess);
  cudaError_t fatal = lost.load(std::memory_order_relaxed);
  return fatal == cudaSuccess ? error : fatal;
}

cudaError_t cudaPeekAtLastError() {
  cudaError_t fatal = lost.load(std::memory_order_relaxed);
  return fatal == cudaSuccess ? thread_error : fatal;
}

const char* cudaGetErrorName(cudaError_t error) { return describe(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return describe(error).text; }

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = driver_version();
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return call([&] {
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    switch (attribute) {
      case cudaDevAttrMultiProcessorCount:
        *value = 4;
        break;
      case cudaDevAttrComputeCapabilityMajor:
        *value = 9;
        break;
      case cudaDevAttrComputeCapabilityMinor:
        *value = 0;
        break;
      case cudaDevAttrWarpSize:
        *value = 32;
        break;
      case cudaDevAttrMaxThreadsPerBlock:
        *value = 1024;
        break;
      case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = 2048;
        break;
      case cudaDevAttrMaxGridDimX:
        *value = 2147483647;
        break;
      case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = 49152;
        break;
      case cudaDevAttrL2CacheSize:
        *value = 50 << 20;
        break;
      case cudaDevAttrMemoryPoolsSupported:
      case cudaDevAttrUnifiedAddressing:
      case cudaDevAttrConcurrentKernels:
        *value = 1;
        break;
      default:
        *value = 0;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call([&] {
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    *properties = {};
    std::strcpy(properties->name, "Tandem CUDA double");
    properties->uuid.bytes[0] = static_cast<char>(device + 1);
    properties->totalGlobalMem = memory_limit();
    properties->sharedMemPerBlock = 49152;
    properties->regsPerBlock = 65536;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->major = 9;
    properties->multiProcessorCount = 4;
    properties->l2CacheSize = 50 << 20;
    properties->memoryBusWidth = 5120;
    properties->asyncEngineCount = 2;
    properties->concurrentKernels = properties->unifiedAddressing = properties->canMapHostMemory = 1;
    properties->memoryPoolsSupported = properties->streamPrioritiesSupported = 1;
    properties->pciBusID = device + 1;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  return call([&] {
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", device + 1);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return call([&] {
    if (std::min(device, peer) < 0 || std::max(device, peer) >= device_count()) return cudaErrorInvalidDevice;
    *can = device != peer;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  return call([&] {
    if (peer < 0 || peer >= device_count() || peer == current_device()) return cudaErrorInvalidDevice;
    if (flags != 0) return cudaErrorInvalidValue;
    return enable_peer(current_device(), peer) ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled;
  });
}

}  // extern "C"
