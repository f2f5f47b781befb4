// The rules of capture and replay.
#include <atomic>
#include <thread>

#include "test_support.h"

using namespace cuda_double_test;

namespace {

cudaGraphExec_t instantiate(cudaGraph_t graph) {
  cudaGraphExec_t exec = nullptr;
  need(cudaGraphInstantiate(&exec, graph, 0));
  need(cudaGraphDestroy(graph));
  return exec;
}

void add_to(cudaStream_t stream, float* memory, float value) {
  launch_on_host(stream, [=] { *memory += value; });
}

/// Two streams, an event for the way there and one back, and a counter on the device.
struct Fixture {
  cudaStream_t stream = make_stream(), side = make_stream();
  cudaEvent_t fork = make_event(), join = make_event();
  float* memory = on_device<float>({0, 0}, stream);
  cudaGraph_t graph = nullptr;

  void begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    need(cudaStreamSynchronize(stream));
    need(cudaStreamBeginCapture(stream, mode));
  }
  void fork_side() {
    need(cudaEventRecord(fork, stream));
    need(cudaStreamWaitEvent(side, fork, 0));
  }
  void join_side() {
    need(cudaEventRecord(join, side));
    need(cudaStreamWaitEvent(stream, join, 0));
  }
  cudaStreamCaptureStatus status() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    need(cudaStreamIsCapturing(stream, &status));
    return status;
  }
  ~Fixture() {
    cudaFreeAsync(memory, stream);
    cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
    cudaStreamDestroy(side);
    cudaEventDestroy(fork);
    cudaEventDestroy(join);
    cudaGetLastError();
  }
};

}  // namespace

TEST_CASE("a graph runs nothing when captured and everything at each launch, forks and joins with it") {
  Fixture f;
  float* pinned = pinned_array<float>(1);
  *pinned = 1;
  f.begin();
  CHECK(f.status() == cudaStreamCaptureStatusActive);
  CHECK(cudaMemcpyAsync(f.memory, pinned, 4, cudaMemcpyHostToDevice, f.stream) == cudaSuccess);
  f.fork_side();
  float* memory = f.memory;
  launch_on_host(f.side, [memory] { memory[1] = 2 * memory[0]; });
  f.join_side();
  launch_on_host(f.stream, [memory] { memory[0] += memory[1]; });
  CHECK(cudaStreamEndCapture(f.stream, &f.graph) == cudaSuccess);
  CHECK(f.status() == cudaStreamCaptureStatusNone);
  CHECK(on_host(f.memory, 1, f.stream)[0] == 0);
  size_t nodes = 0;
  CHECK(cudaGraphGetNodes(f.graph, nullptr, &nodes) == cudaSuccess);
  CHECK(nodes == 3);
  cudaGraphExec_t exec = instantiate(f.graph);
  for (float value : {1.0f, 5.0f}) {
    *pinned = value;  // a graph reads the pinned source at its replay
    CHECK(cudaGraphLaunch(exec, f.stream) == cudaSuccess);
    CHECK(on_host(f.memory, 1, f.stream)[0] == 3 * value);
  }
  CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
  cudaFreeHost(pinned);
}

TEST_CASE("launches of one graph follow each other, also on two streams") {
  Fixture f;
  f.begin();
  f.fork_side();
  add_to(f.side, f.memory, 1);
  f.join_side();
  CHECK(cudaStreamEndCapture(f.stream, &f.graph) == cudaSuccess);
  cudaGraphExec_t exec = instantiate(f.graph);
  for (int i = 0; i < 50; ++i) CHECK(cudaGraphLaunch(exec, i % 2 ? f.side : f.stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(f.side) == cudaSuccess);
  CHECK(on_host(f.memory, 1, f.stream)[0] == 50);
  CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
}

TEST_CASE("a stream that is not joined again fails the capture") {
  Fixture f;
  f.begin();
  f.fork_side();
  add_to(f.side, f.memory, 1);
  CHECK(cudaStreamEndCapture(f.stream, &f.graph) == cudaErrorStreamCaptureUnjoined);
  CHECK(f.graph == nullptr);
  f.begin();
  f.fork_side();
  f.join_side();
  add_to(f.side, f.memory, 1);  // after the join
  CHECK(cudaStreamEndCapture(f.stream, &f.graph) == cudaErrorStreamCaptureUnjoined);
  CHECK(cudaStreamSynchronize(f.side) == cudaSuccess);  // it captures no longer
}

TEST_CASE("synchronising, asking and allocating spoil a capture") {
  Fixture f;
  void* pointer = nullptr;
  float pageable = 0;
  auto spoils = [&](cudaError_t expected, auto&& call) {
    f.begin();
    f.fork_side();
    CHECK(call() == expected);
    CHECK(f.status() == cudaStreamCaptureStatusInvalidated);
    CHECK(cudaMemsetAsync(f.memory, 0, 4, f.stream) == cudaErrorStreamCaptureInvalidated);
    CHECK(cudaStreamEndCapture(f.stream, &f.graph) == cudaErrorStreamCaptureInvalidated);
  };
  cudaError_t unsupported = cudaErrorStreamCaptureUnsupported;
  cudaEvent_t outside = make_event();
  need(cudaEventRecord(outside, f.stream));
  spoils(unsupported, [&] { return cudaStreamSynchronize(f.stream); });
  spoils(unsupported, [&] { return cudaStreamSynchronize(f.side); });
  spoils(unsupported, [&] { return cudaStreamQuery(f.stream); });
  spoils(unsupported, [&] { return cudaDeviceSynchronize(); });
  spoils(unsupported, [&] { return cudaEventQuery(outside); });
  spoils(cudaErrorCapturedEvent, [&] { return cudaEventSynchronize(f.fork); });
  spoils(unsupported, [&] { return cudaMalloc(&pointer, 4); });
  spoils(unsupported, [&] { return cudaMallocAsync(&pointer, 4, f.stream); });
  spoils(unsupported, [&] { return cudaFreeAsync(f.memory, f.stream); });
  spoils(unsupported, [&] { return cudaMemcpyAsync(f.memory, &pageable, 4, cudaMemcpyHostToDevice, f.stream); });
  spoils(cudaErrorStreamCaptureIsolation, [&] { return cudaStreamWaitEvent(f.stream, outside, 0); });
  cudaEventDestroy(outside);
}

TEST_CASE("modes say whose calls disturb a capture") {
  Fixture f;
  void* pointer = nullptr;
  auto in_other_thread = [&] {
    cudaError_t error = cudaSuccess;
    std::thread([&] { error = cudaMalloc(&pointer, 4); }).join();
    if (error == cudaSuccess) std::thread([&] { cudaFree(pointer); }).join();
    return error;
  };
  f.begin(cudaStreamCaptureModeThreadLocal);
  CHECK(in_other_thread() == cudaSuccess);
  CHECK(cudaStreamEndCapture(f.stream, &f.graph) == cudaSuccess);
  need(cudaGraphDestroy(f.graph));
  f.begin(cudaStreamCaptureModeGlobal);
  CHECK(in_other_thread() == cudaErrorStreamCaptureUnsupported);
  CHECK(cudaStreamEndCapture(f.stream, &f.graph) == cudaErrorStreamCaptureInvalidated);
  f.begin(cudaStreamCaptureModeRelaxed);
  CHECK(cudaMalloc(&pointer, 4) == cudaSuccess);
  CHECK(cudaStreamEndCapture(f.stream, &f.graph) == cudaSuccess);
  need(cudaGraphDestroy(f.graph));
  f.begin(cudaStreamCaptureModeGlobal);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  CHECK(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
  CHECK(cudaEventQuery(f.join) == cudaSuccess);
  CHECK(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
  CHECK(mode == cudaStreamCaptureModeRelaxed);
  CHECK(cudaStreamEndCapture(f.stream, &f.graph) == cudaSuccess);
  need(cudaGraphDestroy(f.graph));
  need(cudaFree(pointer));
}

TEST_CASE("a capture ends where it began, and two do not merge") {
  Fixture f;
  CHECK(cudaStreamEndCapture(f.stream, &f.graph) == cudaErrorIllegalState);
  f.begin();
  f.fork_side();
  CHECK(cudaStreamBeginCapture(f.stream, cudaStreamCaptureModeThreadLocal) == cudaErrorIllegalState);
  CHECK(cudaStreamEndCapture(f.side, &f.graph) == cudaErrorStreamCaptureUnmatched);
  CHECK(cudaStreamEndCapture(f.stream, &f.graph) == cudaErrorStreamCaptureInvalidated);
  f.begin();
  need(cudaStreamBeginCapture(f.side, cudaStreamCaptureModeThreadLocal));
  CHECK(cudaEventRecord(f.fork, f.stream) == cudaSuccess);
  CHECK(cudaStreamWaitEvent(f.side, f.fork, 0) == cudaErrorStreamCaptureMerge);
  CHECK(cudaStreamEndCapture(f.stream, &f.graph) == cudaErrorStreamCaptureInvalidated);
  CHECK(cudaStreamEndCapture(f.side, &f.graph) == cudaErrorStreamCaptureInvalidated);
}

namespace {

// The side works on what the main lane writes, ordered at the begin and at the end but not in between.
Child missing_edge("missing edge in a graph", [] {
  Fixture f;
  f.begin();
  f.fork_side();
  add_to(f.stream, f.memory, 1);
  add_to(f.side, f.memory, 1);
  f.join_side();
  cudaStreamEndCapture(f.stream, &f.graph);
  cudaGraphExec_t exec = instantiate(f.graph);
  cudaGraphLaunch(exec, f.stream);
  return int(cudaStreamSynchronize(f.stream));
});

}  // namespace

#if defined(__SANITIZE_THREAD__)
TEST_CASE("ThreadSanitizer sees an edge that a graph lacks") {
  CHECK(run_child("missing edge in a graph").text.find("data race") != std::string::npos);
}
#endif
