// The entry of libtandem_cuda.so: the table of what it can do.
#include <tandem/tensor/cuda/module.h>

#include <tandem/tensor/cuda/allocator.h>
#include <tandem/tensor/cuda/backend.h>
#include <tandem/tensor/cuda/capture.h>
#include <tandem/tensor/cuda/cublas_lt.h>
#include <tandem/tensor/cuda/device_error.h>
#include <tandem/tensor/cuda/graph.h>
#include <tandem/tensor/cuda/pinned.h>
#include <tandem/tensor/cuda/runtime.h>

namespace tandem::cuda {
namespace {

DeviceProperties properties_of(int device) {
  use(device);
  cudaDeviceProp p{};
  check_status(cudaGetDeviceProperties(&p, device), "properties");
  std::size_t free = 0, total = 0;
  check_status(cudaMemGetInfo(&free, &total), "properties");
  return {.name = p.name,
          .major = p.major,
          .minor = p.minor,
          .multiprocessors = p.multiProcessorCount,
          .total_memory = total,
          .free_memory = free};
}

void synchronize_device(int device) {
  check_no_capture("synchronize",
                   "a graph is being captured, and nothing runs that could be waited for; wait after replay()");
  use(device);
  check_status(cudaDeviceSynchronize(), "synchronize");
  throw_device_error(Device(DeviceType::cuda, device));
}

bool is_pinned_memory(const void* data) {
  cudaPointerAttributes attributes{};
  check_status(cudaPointerGetAttributes(&attributes, data), "is_pinned");
  return attributes.type == cudaMemoryTypeHost;
}

// What the calling thread's stream has been given so far.
void* record_event(int device, unsigned flags) {
  const cudaStream_t stream = use(device);
  cudaEvent_t event = nullptr;
  check_status(cudaEventCreateWithFlags(&event, flags), "cuda");
  check_status(cudaEventRecord(event, stream), "cuda");
  return event;
}
void* new_event(int device) { return record_event(device, cudaEventDisableTiming); }

void* record_time(int device) {
  if (current_capture() != nullptr) return nullptr;  // what is captured takes no time now
  return record_event(device, cudaEventDefault);
}

double seconds_between(void* start, void* end) {
  if (start == nullptr || end == nullptr) return 0;
  float milliseconds = 0;
  check_status(cudaEventSynchronize(static_cast<cudaEvent_t>(end)), "phases");
  check_status(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(start), static_cast<cudaEvent_t>(end)),
               "phases");
  return static_cast<double>(milliseconds) * 1e-3;
}

void release_time(void* event) {
  if (event != nullptr && !forked()) (void)cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

ThreadStream exchange_thread_stream(ThreadStream next) {
  const auto [device, stream] = exchange_stream(next.device, static_cast<cudaStream_t>(next.stream));
  return {device, stream};
}

void* new_stream(int device) {
  use(device);
  return create_stream(true);
}

void release_stream(int device, void* stream) {
  if (forked()) return;
  (void)cudaSetDevice(device);
  forget_stream(device, static_cast<cudaStream_t>(stream));
  (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream));
}

bool is_capturing(int device) { return capturing(Device(DeviceType::cuda, device)); }

void wait_event(int device, void* event) {
  check_status(cudaStreamWaitEvent(use(device), static_cast<cudaEvent_t>(event), 0), "cuda");
}

bool event_done(void* event) { return is_done(static_cast<cudaEvent_t>(event)); }

const Module kTable = {
    .backend = &kBackend,
    .device_count = device_count,
    .properties = properties_of,
    .memory_stats = memory_stats,
    .reset_peak_memory = reset_peak_memory,
    .empty_cache = empty_cache,
    .synchronize = synchronize_device,
    .allocate_pinned = allocate_pinned,
    .release_pinned = release_pinned,
    .is_pinned = is_pinned_memory,
    .record_time = record_time,
    .seconds_between = seconds_between,
    .release_time = release_time,
    .set_allow_tf32 = set_allow_tf32,
    .allow_tf32 = allow_tf32,
    .begin_capture = begin_capture,
    .at_replay = at_replay,
    .exchange_stream = exchange_thread_stream,
    .new_stream = new_stream,
    .release_stream = release_stream,
    .is_capturing = is_capturing,
    .new_event = new_event,
    .wait_event = wait_event,
    .event_done = event_done,
    .set_synchronize_hook = set_synchronize_hook,
};

}  // namespace
}  // namespace tandem::cuda

extern "C" __attribute__((visibility("default"))) const tandem::cuda::Module* tandem_cuda_module_1(
    const tandem::cuda::Host& host) {
  tandem::cuda::g_host = &host;
  return &tandem::cuda::kTable;
}
