// The rules of the double's runtime that other tests rely on: order, memory, errors, processes.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <string>
#include <thread>

#include "test_support.h"

using namespace cuda_double_test;

namespace {

/// Keeps a stream busy until it is opened.
struct Gate {
  std::atomic<bool> open{false};
  void close(cudaStream_t stream) {
    launch_on_host(stream, [this] {
      while (!open.load()) std::this_thread::yield();
    });
  }
};

void fill(cudaStream_t stream, float* memory, size_t count, float value) {
  launch_on_host(stream, [=] {
    for (size_t i = 0; i < count; ++i) memory[i] = value;
  });
}

uint64_t pool_attribute(cudaMemPoolAttr attribute) {
  cudaMemPool_t pool = nullptr;
  uint64_t value = 0;
  REQUIRE(cudaDeviceGetDefaultMemPool(&pool, 0) == cudaSuccess);
  REQUIRE(cudaMemPoolGetAttribute(pool, attribute, &value) == cudaSuccess);
  return value;
}

}  // namespace

TEST_CASE("a stream runs its work in order, and queries and synchronisation see its end") {
  cudaStream_t stream = make_stream();
  cudaEvent_t event = make_event();
  float* memory = device_array<float>(4, stream);
  float* result = pinned_array<float>(4);
  Gate gate;
  gate.close(stream);
  fill(stream, memory, 4, 1);
  launch_on_host(stream, [=] { memory[2] += 1; });
  CHECK(cudaMemcpyAsync(result, memory, 16, cudaMemcpyDeviceToHost, stream) == cudaSuccess);
  CHECK(cudaEventRecord(event, stream) == cudaSuccess);
  CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
  CHECK(cudaEventQuery(event) == cudaErrorNotReady);
  CHECK(cudaGetLastError() == cudaErrorNotReady);  // as the real one keeps it, too
  CHECK(cudaGetLastError() == cudaSuccess);
  gate.open = true;
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(cudaStreamQuery(stream) == cudaSuccess);
  CHECK(cudaEventQuery(event) == cudaSuccess);
  CHECK(result[0] == 1);
  CHECK(result[2] == 2);
  CHECK(cudaFreeAsync(memory, stream) == cudaSuccess);
  CHECK(cudaFreeHost(result) == cudaSuccess);
  CHECK(cudaEventDestroy(event) == cudaSuccess);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

TEST_CASE("an event orders two streams, and a later record does not move an earlier wait") {
  cudaStream_t first = make_stream(), second = make_stream();
  cudaEvent_t event = make_event();
  float* memory = device_array<float>(1, first);
  Gate gate, later;
  gate.close(first);
  fill(first, memory, 1, 5);
  CHECK(cudaEventRecord(event, first) == cudaSuccess);
  CHECK(cudaStreamWaitEvent(second, event, 0) == cudaSuccess);
  later.close(first);
  CHECK(cudaEventRecord(event, first) == cudaSuccess);
  launch_on_host(second, [=] { memory[0] *= 2; });
  CHECK(cudaStreamQuery(second) == cudaErrorNotReady);
  gate.open = true;
  CHECK(on_host(memory, 1, second)[0] == 10);
  CHECK(cudaStreamQuery(first) == cudaErrorNotReady);
  later.open = true;
  CHECK(cudaEventSynchronize(event) == cudaSuccess);
  CHECK(cudaFreeAsync(memory, first) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  cudaEventDestroy(event);
  cudaStreamDestroy(first);
  cudaStreamDestroy(second);
  cudaGetLastError();
}

TEST_CASE("times come from events with timing alone") {
  cudaStream_t stream = make_stream();
  cudaEvent_t start = make_event(0), end = make_event(0), without = make_event();
  float milliseconds = -1;
  CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaErrorInvalidResourceHandle);
  CHECK(cudaEventRecord(start, stream) == cudaSuccess);
  launch_on_host(stream, [] { usleep(2000); });
  CHECK(cudaEventRecord(end, stream) == cudaSuccess);
  CHECK(cudaEventRecord(without, stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaSuccess);
  CHECK(milliseconds >= 2);
  CHECK(cudaEventElapsedTime(&milliseconds, start, without) == cudaErrorInvalidResourceHandle);
  for (cudaEvent_t event : {start, end, without}) cudaEventDestroy(event);
  cudaStreamDestroy(stream);
  cudaGetLastError();
}

TEST_CASE("fresh memory of devices and pinned memory hold NaN") {
  cudaStream_t stream = make_stream();
  float* pool = device_array<float>(3, stream);
  CHECK(std::isnan(on_host(pool, 3, stream)[2]));
  void* direct = nullptr;
  CHECK(cudaMalloc(&direct, 12) == cudaSuccess);
  CHECK(std::isnan(on_host(static_cast<float*>(direct), 3, stream)[2]));
  float* pinned = pinned_array<float>(3);
  CHECK(std::isnan(pinned[2]));
  CHECK(cudaFree(direct) == cudaSuccess);
  CHECK(cudaFree(pool) == cudaSuccess);
  CHECK(cudaFreeHost(pinned) == cudaSuccess);
  cudaStreamDestroy(stream);
}

TEST_CASE("a copy from pinned memory reads when its turn comes, one from pageable memory when it is called") {
  cudaStream_t stream = make_stream();
  float* memory = device_array<float>(2, stream);
  float* pinned = pinned_array<float>(1);
  float pageable = 1;
  std::atomic<bool> open{false};
  *pinned = 1;
  launch_on_host(stream, [&open, pinned] {
    while (!open.load()) std::this_thread::yield();
    *pinned = 2;
  });
  CHECK(cudaMemcpyAsync(memory, pinned, 4, cudaMemcpyHostToDevice, stream) == cudaSuccess);
  CHECK(cudaMemcpyAsync(memory + 1, &pageable, 4, cudaMemcpyHostToDevice, stream) == cudaSuccess);
  pageable = 2;
  open = true;
  std::vector<float> values = on_host(memory, 2, stream);
  CHECK(values[0] == 2);
  CHECK(values[1] == 1);
  float result = 0;
  fill(stream, memory, 1, 7);
  CHECK(cudaMemcpyAsync(&result, memory, 4, cudaMemcpyDefault, stream) == cudaSuccess);
  CHECK(result == 7);  // to pageable memory: it has happened
  CHECK(cudaMemcpyAsync(memory, &result, 4, cudaMemcpyDeviceToHost, stream) == cudaErrorInvalidValue);
  CHECK(cudaMemsetAsync(memory, 0, 8, stream) == cudaSuccess);
  CHECK(on_host(memory, 2, stream)[1] == 0);
  CHECK(cudaFreeAsync(memory, stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  cudaFreeHost(pinned);
  cudaStreamDestroy(stream);
  cudaGetLastError();
}

TEST_CASE("copies of rows, and from device to device") {
  cudaStream_t stream = make_stream();
  float* rows = on_device<float>({1, 2, 3, 4, 5, 6}, stream);
  float* column = device_array<float>(2, stream);
  CHECK(cudaMemcpy2DAsync(column, 4, rows + 1, 12, 4, 2, cudaMemcpyDeviceToDevice, stream) == cudaSuccess);
  CHECK(on_host(column, 2, stream) == std::vector<float>{2, 5});
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  cudaStream_t other = make_stream();
  float* peer = device_array<float>(2, other);
  CHECK(cudaMemcpyPeerAsync(peer, 1, column, 0, 8, other) == cudaSuccess);
  CHECK(on_host(peer, 2, other) == std::vector<float>{2, 5});
  int can = 0;
  CHECK(cudaDeviceCanAccessPeer(&can, 1, 0) == cudaSuccess);
  CHECK(can == 1);
  CHECK(cudaDeviceEnablePeerAccess(0, 0) == cudaSuccess);
  CHECK(cudaDeviceEnablePeerAccess(0, 0) == cudaErrorPeerAccessAlreadyEnabled);
  launch_on_host(stream, [] {});  // of device 0
  CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
  cudaFreeAsync(peer, other);
  cudaStreamSynchronize(other);
  cudaStreamDestroy(other);
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  cudaFreeAsync(rows, stream);
  cudaFreeAsync(column, stream);
  cudaStreamDestroy(stream);
}

TEST_CASE("memory is counted, ends, and is given back") {
  cudaStream_t stream = make_stream();
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  size_t free_before = 0, free_after = 0, total = 0;
  REQUIRE(cudaMemGetInfo(&free_before, &total) == cudaSuccess);
  void* pointer = nullptr;
  CHECK(cudaMallocAsync(&pointer, total + 1, stream) == cudaErrorMemoryAllocation);
  CHECK(pointer == nullptr);
  CHECK(cudaMalloc(&pointer, total + 1) == cudaErrorMemoryAllocation);
  CHECK(std::string(cudaGetErrorName(cudaGetLastError())) == "cudaErrorMemoryAllocation");
  CHECK(cudaGetLastError() == cudaSuccess);  // not sticky
  cudaMemPool_t pool = nullptr;
  uint64_t threshold = UINT64_MAX, zero = 0;
  REQUIRE(cudaDeviceGetDefaultMemPool(&pool, 0) == cudaSuccess);
  CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold) == cudaSuccess);
  CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &zero) == cudaSuccess);
  CHECK(cudaMallocAsync(&pointer, 1 << 20, stream) == cudaSuccess);
  CHECK(pool_attribute(cudaMemPoolAttrUsedMemCurrent) == 1 << 20);
  CHECK(cudaFreeAsync(pointer, stream) == cudaSuccess);
  CHECK(pool_attribute(cudaMemPoolAttrUsedMemCurrent) == 0);
  CHECK(pool_attribute(cudaMemPoolAttrUsedMemHigh) == 1 << 20);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(pool_attribute(cudaMemPoolAttrReservedMemCurrent) >= 1 << 20);
  REQUIRE(cudaMemGetInfo(&free_after, &total) == cudaSuccess);
  CHECK(free_after <= free_before);
  CHECK(cudaMemPoolTrimTo(pool, 0) == cudaSuccess);
  CHECK(pool_attribute(cudaMemPoolAttrReservedMemCurrent) == 0);
  cudaStreamDestroy(stream);
}

TEST_CASE("pointers tell whose they are") {
  cudaStream_t stream = make_stream();
  float* memory = device_array<float>(4, stream);
  float* pinned = pinned_array<float>(4);
  float local = 0;
  cudaPointerAttributes attributes = {};
  CHECK(cudaPointerGetAttributes(&attributes, memory + 3) == cudaSuccess);
  CHECK(attributes.type == cudaMemoryTypeDevice);
  CHECK(attributes.device == 0);
  CHECK(cudaPointerGetAttributes(&attributes, pinned + 1) == cudaSuccess);
  CHECK(attributes.type == cudaMemoryTypeHost);
  CHECK(cudaPointerGetAttributes(&attributes, &local) == cudaSuccess);
  CHECK(attributes.type == cudaMemoryTypeUnregistered);
  cudaFreeAsync(memory, stream);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  cudaFreeHost(pinned);
  cudaStreamDestroy(stream);
}

TEST_CASE("host functions run in the order of the stream, and a destroyed stream ends its work") {
  cudaStream_t stream = make_stream();
  static std::atomic<int> calls{0};
  int by = 3;
  Gate gate;
  gate.close(stream);
  CHECK(cudaLaunchHostFunc(
            stream, [](void* data) { calls += *static_cast<int*>(data); }, &by) == cudaSuccess);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
  CHECK(calls == 0);
  gate.open = true;
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(calls == 3);
}

TEST_CASE("errors have names and texts, and devices properties") {
  CHECK(std::string(cudaGetErrorString(cudaErrorMemoryAllocation)) == "out of memory");
  CHECK(std::string(cudaGetErrorName(cudaErrorStreamCaptureUnjoined)) == "cudaErrorStreamCaptureUnjoined");
  CHECK(cudaSetDevice(4) == cudaErrorInvalidDevice);
  CHECK(cudaPeekAtLastError() == cudaErrorInvalidDevice);
  CHECK(cudaGetLastError() == cudaErrorInvalidDevice);
  cudaDeviceProp properties = {};
  CHECK(cudaGetDeviceProperties(&properties, 1) == cudaSuccess);
  CHECK(properties.totalGlobalMem == size_t(1) << 30);
  CHECK(properties.pciBusID == 2);
}

namespace {

Child no_device("no device", [] {
  int count = 7;
  cudaError_t error = cudaGetDeviceCount(&count);
  std::fprintf(stderr, "%s count %d, malloc %s", cudaGetErrorName(error), count,
               cudaGetErrorName(cudaMalloc(reinterpret_cast<void**>(&count), 4)));
  return 0;
});

Child overrun("overrun", [] {
  cudaStream_t stream = make_stream();
  float* memory = device_array<float>(4, stream);
  float* pinned = pinned_array<float>(8);
  return int(cudaMemcpyAsync(pinned, memory, 20, cudaMemcpyDeviceToHost, stream));
});

Child legacy("legacy stream", [] {
  float value = 0;
  return int(cudaMemcpyAsync(&value, &value, 4, cudaMemcpyDefault, nullptr));
});

Child dereference("dereference", [] {
  cudaStream_t stream = make_stream();
  float* memory = on_device<float>({1, 2}, stream);
  launch_on_host(stream, [=] { memory[1] += 1; });
  if (on_host(memory, 2, stream)[1] != 3) return 1;
  std::fprintf(stderr, "now");
  volatile float value = memory[1];
  return int(value);
});

Child use_after_free("use after free", [] {
  cudaStream_t stream = make_stream();
  float* memory = on_device<float>({1, 2}, stream);
  cudaFreeAsync(memory, stream);
  launch_on_host(stream, [=] { memory[1] = 1; });
  return int(cudaStreamSynchronize(stream));
});

Child forked("fork", [] {
  cudaStream_t stream = make_stream();
  pid_t process = fork();
  if (process == 0) {
    int count = 0;
    _exit(cudaStreamSynchronize(stream) == cudaErrorInitializationError &&
                  cudaGetDeviceCount(&count) == cudaErrorInitializationError
              ? 5
              : 6);
  }
  return wait_child(process);
});

Child lost("lost device", [] {
  cudaStream_t stream = make_stream();
  launch_on_host(stream, [] {});
  launch_on_host(stream, [] { std::abort(); });  // the second piece of work faults and does not run
  if (cudaStreamSynchronize(stream) != cudaErrorIllegalAddress) return 1;
  cudaGetLastError();
  if (cudaGetLastError() != cudaErrorIllegalAddress) return 2;
  return cudaDeviceSynchronize() == cudaErrorIllegalAddress ? 0 : 3;
});

Child missing_event("missing event", [] {
  cudaStream_t first = make_stream(), second = make_stream();
  float* memory = on_device<float>({1}, first);
  cudaStreamSynchronize(first);
  launch_on_host(first, [=] { memory[0] += 1; });
  launch_on_host(second, [=] { memory[0] += 1; });
  cudaStreamSynchronize(first);
  return int(cudaStreamSynchronize(second));
});

Child missing_synchronise("missing synchronise", [] {
  cudaStream_t stream = make_stream();
  float* memory = on_device<float>({1}, stream);
  float* pinned = pinned_array<float>(1);
  cudaMemcpyAsync(pinned, memory, 4, cudaMemcpyDeviceToHost, stream);
  cudaEvent_t event = make_event();
  cudaEventRecord(event, stream);
  usleep(20000);
  volatile float value = pinned[0];
  return value == 1 ? 0 : 1;
});

bool contains(const Outcome& outcome, const char* part) {
  INFO(outcome.text);
  return outcome.text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("without a device or a driver every call says so") {
  CHECK(contains(run_child("no device", {{"TANDEM_CUDA_DOUBLE_DEVICES", "0"}}), "cudaErrorNoDevice count 7"));
  CHECK(contains(run_child("no device", {{"TANDEM_CUDA_DOUBLE_DEVICES", "nodriver"}}),
                 "cudaErrorInsufficientDriver count 7, malloc cudaErrorInsufficientDriver"));
}

TEST_CASE("what would be silent corruption ends the process") {
  Outcome outcome = run_child("overrun");
  CHECK(outcome.status != 0);
  CHECK(contains(outcome, "leave their allocation of 16 bytes"));
  CHECK(contains(run_child("legacy stream"), "a default stream is used"));
}

TEST_CASE("protected memory faults when the host touches it") {
  CHECK(run_child("dereference", {{"TANDEM_CUDA_DOUBLE_PROTECT", "0"}}).status == 3);
  Outcome outcome = run_child("dereference", {{"TANDEM_CUDA_DOUBLE_PROTECT", "1"}});
  CHECK(contains(outcome, "now"));
  CHECK(outcome.status != 3);
}

TEST_CASE("a process that forked after CUDA was touched gets an error") { CHECK(run_child("fork").status == 5); }

TEST_CASE("a lost device stays lost") {
  CHECK(run_child("lost device", {{"TANDEM_CUDA_DOUBLE_FAULT", "2"}}).status == 0);
}

#if defined(__SANITIZE_ADDRESS__)
TEST_CASE("a use after the stream reached the free is found") {
  CHECK(contains(run_child("use after free"), "heap-use-after-free"));
}
#endif

#if defined(__SANITIZE_THREAD__)
TEST_CASE("ThreadSanitizer sees a missing event and a missing synchronise") {
  for (int i = 0; i < 3; ++i) {
    CHECK(contains(run_child("missing event"), "data race"));
    CHECK(contains(run_child("missing synchronise"), "data race"));
  }
}
#endif
