// NCCL between processes, and mistakes in the order of streams that ThreadSanitizer must see.
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "nccl_support.h"

using namespace cuda_double_test;

namespace {

using Variables = std::vector<std::pair<std::string, std::string>>;

Variables variables_of(const ncclUniqueId& id, int rank, int device, const char* host) {
  std::string hex;
  for (char byte : id.internal) {
    char digits[3] = {};
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
    hex += digits;
  }
  return {{"TEST_ID", hex},
          {"TEST_RANK", std::to_string(rank)},
          {"TEST_DEVICE", std::to_string(device)},
          {"NCCL_HOSTID", host}};
}

/// Joins as the variables say.
ncclResult_t join(ncclComm_t* comm) {
  ncclUniqueId id = {};
  std::string hex = std::getenv("TEST_ID");
  for (size_t i = 0; i < sizeof id.internal; ++i)
    id.internal[i] = static_cast<char>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  need(cudaSetDevice(std::atoi(std::getenv("TEST_DEVICE"))));
  return ncclCommInitRank(comm, 2, id, std::atoi(std::getenv("TEST_RANK")));
}

Child adds("process that adds", [] {
  ncclComm_t comm = nullptr;
  if (ncclResult_t result = join(&comm)) return int(result);
  cudaStream_t stream = make_stream();
  float* memory = on_device(std::vector<float>(100000, 1), stream);
  ncclAllReduce(memory, memory, 100000, ncclFloat32, ncclSum, comm, stream);
  if (on_host(memory, 100000, stream)[99999] != 2) return 100;
  return int(ncclCommDestroy(comm));
});

Child dies("process that dies", [] {
  ncclComm_t comm = nullptr;
  if (ncclResult_t result = join(&comm)) return int(result);
  raise(SIGKILL);
  return 0;
});

Child survives("process that survives", [] {
  ncclComm_t comm = nullptr;
  if (ncclResult_t result = join(&comm)) return int(result);
  cudaStream_t stream = make_stream();
  float* memory = on_device<float>({1}, stream);
  ncclAllReduce(memory, memory, 1, ncclFloat32, ncclSum, comm, stream);
  usleep(100000);
  ncclResult_t state = ncclSuccess;
  ncclCommGetAsyncError(comm, &state);
  if (state != ncclSuccess || cudaStreamQuery(stream) != cudaErrorNotReady) return 100;
  ncclCommAbort(comm);
  return cudaStreamSynchronize(stream) == cudaSuccess ? 0 : 101;
});

std::pair<int, int> run_pair(const char* first, const char* second, int other_device, const char* other_host) {
  ncclUniqueId id = {};
  REQUIRE(ncclGetUniqueId(&id) == ncclSuccess);
  int one = start_child(first, variables_of(id, 0, 0, "a"));
  int two = start_child(second, variables_of(id, 1, other_device, other_host));
  int status = wait_child(one);
  return {status, wait_child(two)};
}

}  // namespace

TEST_CASE("collectives between processes, on two devices and on one") {
  using Statuses = std::pair<int, int>;
  CHECK(run_pair("process that adds", "process that adds", 1, "a") == Statuses{0, 0});
  CHECK(run_pair("process that adds", "process that adds", 0, "b") == Statuses{0, 0});
  CHECK(run_pair("process that adds", "process that adds", 0, "a") == Statuses{ncclInvalidUsage, ncclInvalidUsage});
}

TEST_CASE("a killed process leaves the other waiting until it aborts") {
  CHECK(run_pair("process that survives", "process that dies", 1, "a") == std::pair<int, int>{0, 128 + SIGKILL});
}

namespace {

/// A step of training on two ranks: gradients, their sum on another stream, the update. Events may be left out.
int train(bool event_before, bool event_after) {
  run_ranks(2, [&](Rank& rank) {
    cudaStream_t compute = make_stream();
    cudaEvent_t ready = make_event(), reduced = make_event();
    float* gradient = on_device<float>({0}, compute);
    float* weight = on_device<float>({1}, compute);
    need(cudaStreamSynchronize(compute));
    for (int step = 0; step < 3; ++step) {
      launch_on_host(compute, [=] { *gradient = *weight; });
      need(cudaEventRecord(ready, compute));
      if (event_before) need(cudaStreamWaitEvent(rank.stream, ready, 0));
      ncclAllReduce(gradient, gradient, 1, ncclFloat32, ncclAvg, rank.comm, rank.stream);
      need(cudaEventRecord(reduced, rank.stream));
      if (event_after) need(cudaStreamWaitEvent(compute, reduced, 0));
      launch_on_host(compute, [=] { *weight -= *gradient / 2; });
    }
    if (on_host(weight, 1, compute)[0] != 0.125f && event_before && event_after) std::abort();
    need(cudaStreamSynchronize(rank.stream));
    need(cudaFreeAsync(gradient, compute));
    need(cudaFreeAsync(weight, compute));
    need(cudaStreamSynchronize(compute));
    need(cudaStreamDestroy(compute));
    need(cudaEventDestroy(ready));
    need(cudaEventDestroy(reduced));
  });
  return 0;
}

Child correct("training", [] { return train(true, true); });
Child no_ready("training without an event before the sum", [] { return train(false, true); });
Child no_reduced("training without a wait before the update", [] { return train(true, false); });

}  // namespace

TEST_CASE("a sum on a stream of its own is ordered by two events") {
  Outcome outcome = run_child("training");
  INFO(outcome.text);
  CHECK(outcome.status == 0);
  CHECK(outcome.text.find("data race") == std::string::npos);
}

#if defined(__SANITIZE_THREAD__)
TEST_CASE("ThreadSanitizer sees that an event of the sum is missing") {
  for (int i = 0; i < 3; ++i) {
    CHECK(run_child("training without an event before the sum").text.find("data race") != std::string::npos);
    CHECK(run_child("training without a wait before the update").text.find("data race") != std::string::npos);
  }
}
#endif
