// Workers and the calls on streams. What it cannot catch: too many streams for the hardware, priorities (kept, but
// without effect), and work that only runs because two kernels happen to run at once.
#include "stream.h"

#include <random>
#include <thread>
#include <vector>

#include "device_memory.h"
#include "graph.h"
#include "runtime.h"

namespace cuda_double {

struct Worker::Operation {
  Body body = {};
  std::atomic<Operation*> next{nullptr};
};

namespace {

std::mutex workers_mutex;
std::vector<Worker*>& workers() {
  static auto* all = new std::vector<Worker*>;
  return *all;
}

/// TANDEM_CUDA_DOUBLE_FAULT=n: the n-th piece of work fails as by an illegal address, and the device is lost.
bool faults_now() {
  static const long at = std::stol(variable("TANDEM_CUDA_DOUBLE_FAULT", "0"));
  static std::atomic<long> count{0};
  return at > 0 && count.fetch_add(1, std::memory_order_relaxed) + 1 == at;
}

}  // namespace

Worker::Worker() : newest_(new Operation), latest_done_(newest_) {
  std::thread([this] { run(); }).detach();
}

Worker* Worker::take(int device) {
  std::lock_guard lock(workers_mutex);
  for (Worker* worker : workers()) {
    if (worker->taken_ || !worker->idle()) continue;
    worker->taken_ = true;
    worker->device_ = device;
    return worker;
  }
  auto* made = new Worker;
  made->device_ = device;
  workers().push_back(made);
  return made;
}

void Worker::give_back() {
  std::lock_guard lock(workers_mutex);
  taken_ = false;
}

void Worker::push(Body body) {
  auto* operation = new Operation{std::move(body)};
  std::lock_guard lock(mutex_);
  newest_->next.store(operation, std::memory_order_release);
  newest_ = operation;
  pushed_.fetch_add(1, std::memory_order_relaxed);
  futex_wake(pushed_);
}

void Worker::run() {
  for (uint32_t count = 1;; ++count) {
    Operation* operation = nullptr;
    // The edge comes from the operation itself: a wait for the counter would also order what was pushed after it.
    while (!(operation = latest_done_->next.load(std::memory_order_acquire))) {
      uint32_t seen = pushed_.load(std::memory_order_relaxed);
      if (static_cast<int32_t>(seen - count) < 0) futex_wait(pushed_, seen);
    }
    delete std::exchange(latest_done_, operation);
    shake();
    operation->body();
    operation->body = {};
    done_.publish(count);
  }
}

void synchronize_device(int device) {
  std::vector<Worker*> of_device;
  {
    std::lock_guard lock(workers_mutex);
    for (Worker* worker : workers())
      if (worker->device_ == device) of_device.push_back(worker);
  }
  for (Worker* worker : of_device) worker->synchronize();
}

void shake() {
  static const std::string seed = variable("TANDEM_CUDA_DOUBLE_DELAY", "");
  if (seed.empty()) return;
  static std::atomic<unsigned> threads{0};
  thread_local std::minstd_rand random(static_cast<unsigned>(std::stoul(seed)) * 7919 +
                                       threads.fetch_add(1, std::memory_order_relaxed) + 1);
  if (random() % 4 == 0) usleep(random() % 300);
}

void run_work(int device, const Body& body) {
  if (faults_now()) lose_device(cudaErrorIllegalAddress);
  if (availability() != cudaSuccess) return;
  DeviceAccess access(device);
  body();
}

void require_explicit(cudaStream_t stream, const char* call) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
    die("{}: a default stream is used; pass an explicit one", call);
}

cudaError_t enqueue_on(int device, cudaStream_t stream, Body body) {
  if (stream->capture) return stream->capture->add(stream->lane, device, std::move(body));
  stream->worker->push([device, body = std::move(body)] { run_work(device, body); });
  return cudaSuccess;
}

cudaError_t enqueue(cudaStream_t stream, Body body) { return enqueue_on(stream->device, stream, std::move(body)); }

}  // namespace cuda_double

namespace tandem::cuda {

/// What the launch header of the backend calls in place of a kernel launch. Its errors are found by cudaGetLastError.
void launch_on_host(cudaStream_t stream, UniqueFunction<void()> body);

void launch_on_host(cudaStream_t stream, UniqueFunction<void()> body) {
  cuda_double::call([&] {
    cuda_double::require_explicit(stream, "kernel launch");
    if (stream->device != cuda_double::current_device())
      return cuda_double::reject(cudaErrorInvalidResourceHandle,
                                 "kernel launch: the stream is of device {}, the current device is {}", stream->device,
                                 cuda_double::current_device());
    return cuda_double::enqueue(stream, std::move(body));
  });
}

}  // namespace tandem::cuda

using namespace cuda_double;

extern "C" {

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call([&] {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  static std::atomic<unsigned long long> ids{0};
  return call([&] {
    if (flags != cudaStreamNonBlocking) die("cudaStreamCreate: a stream that the legacy default stream would block");
    *stream = new CUstream_st{Worker::take(current_device()), current_device(), std::min(0, std::max(-5, priority)),
                              flags, ids.fetch_add(1, std::memory_order_relaxed) + 1};
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

// The work goes on and nobody waits for it, as on a device.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return call([&] {
    require_explicit(stream, "cudaStreamDestroy");
    if (stream->capture) stream->capture->leave(stream);
    stream->worker->give_back();
    delete stream;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return call([&] {
    require_explicit(stream, "cudaStreamSynchronize");
    if (cudaError_t error = forbid_in_capture(stream, "cudaStreamSynchronize")) return error;
    if (dropped(Order::synchronise)) return cudaSuccess;
    stream->worker->synchronize();
    trim_pool(stream->device);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return call([&] {
    require_explicit(stream, "cudaStreamQuery");
    if (cudaError_t error = forbid_in_capture(stream, "cudaStreamQuery")) return error;
    return dropped(Order::query) || stream->worker->idle() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return call([&] {
    if (cudaError_t error = forbid_in_capture(nullptr, "cudaDeviceSynchronize")) return error;
    if (dropped(Order::synchronise)) return cudaSuccess;
    synchronize_device(current_device());
    trim_pool(current_device());
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return call([&] {
    *priority = stream->priority;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  return call([&] {
    *flags = stream->flags;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  return call([&] {
    *id = stream->id;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  return call([&] {
    *device = stream->device;
    return cudaSuccess;
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return call([&] {
    require_explicit(stream, "cudaLaunchHostFunc");
    return enqueue_on(-1, stream, [function, data] { function(data); });
  });
}

}  // extern "C"
