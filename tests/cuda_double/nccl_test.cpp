// The rules of the double's NCCL: between threads, between processes, in graphs, and when something goes wrong.
#include <nccl.h>
#include <unistd.h>

#include <future>
#include <string>
#include <thread>

#include "nccl_support.h"

using namespace cuda_double_test;

namespace {

/// Values that a rank puts in, and what came out of `call(send, receive)`.
template <class T, class F>
std::vector<T> through(Rank& rank, const std::vector<T>& values, size_t results, F&& call) {
  T* send = on_device(values, rank.stream);
  T* receive = device_array<T>(results, rank.stream);
  CHECK(call(send, receive) == ncclSuccess);
  std::vector<T> out = on_host(receive, results, rank.stream);
  need(cudaFreeAsync(send, rank.stream));
  need(cudaFreeAsync(receive, rank.stream));
  return out;
}

template <class T>
std::vector<T> all_reduce(Rank& rank, const std::vector<T>& values, ncclDataType_t type, ncclRedOp_t operation) {
  return through(rank, values, values.size(), [&](const T* send, T* receive) {
    return ncclAllReduce(send, receive, values.size(), type, operation, rank.comm, rank.stream);
  });
}

}  // namespace

TEST_CASE("collectives between threads") {
  run_ranks(3, [](Rank& rank) {
    using Floats = std::vector<float>;
    float r = static_cast<float>(rank.rank + 1);
    CHECK(all_reduce(rank, Floats{r, 10 * r}, ncclFloat32, ncclSum) == Floats{6, 60});
    CHECK(all_reduce(rank, Floats{r, 10 * r}, ncclFloat32, ncclAvg) == Floats{2, 20});
    CHECK(all_reduce(rank, Floats{r, 10 * r}, ncclFloat32, ncclMax) == Floats{3, 30});
    CHECK(all_reduce(rank, Floats{r, 10 * r}, ncclFloat32, ncclMin) == Floats{1, 10});
    CHECK(all_reduce(rank, Floats{r, 10 * r}, ncclFloat32, ncclProd) == Floats{6, 6000});
    CHECK(through(rank, Floats{r, r + 1}, 2, [&](const float* send, float* receive) {
            return ncclBroadcast(send, receive, 2, ncclFloat32, 1, rank.comm, rank.stream);
          }) == Floats{2, 3});
    Floats reduced = through(rank, Floats{r}, 1, [&](const float* send, float* receive) {
      return ncclReduce(send, receive, 1, ncclFloat32, ncclSum, 2, rank.comm, rank.stream);
    });
    CHECK((rank.rank == 2) == (reduced == Floats{6}));
    CHECK(through(rank, Floats{r, -r}, 6, [&](const float* send, float* receive) {
            return ncclAllGather(send, receive, 2, ncclFloat32, rank.comm, rank.stream);
          }) == Floats{1, -1, 2, -2, 3, -3});
    CHECK(through(rank, Floats{r, 2 * r, 3 * r}, 1, [&](const float* send, float* receive) {
            return ncclReduceScatter(send, receive, 1, ncclFloat32, ncclSum, rank.comm, rank.stream);
          }) == Floats{6 * r});
    std::vector<double> large(40000, r);  // more than a chunk
    large.back() = 2 * r;
    std::vector<double> sums = all_reduce(rank, large, ncclFloat64, ncclSum);
    CHECK(sums[20000] == 6);
    CHECK(sums.back() == 12);
    int count = 0, number = 0, device = 0;
    CHECK(ncclCommCount(rank.comm, &count) == ncclSuccess);
    CHECK(ncclCommUserRank(rank.comm, &number) == ncclSuccess);
    CHECK(ncclCommCuDevice(rank.comm, &device) == ncclSuccess);
    CHECK(count == 3);
    CHECK(number == rank.rank);
    CHECK(device == rank.rank);
    CHECK(ncclCommFinalize(rank.comm) == ncclSuccess);
  });
}

TEST_CASE("reductions of every type") {
  run_ranks(2, [](Rank& rank) {
    auto sum = [&](auto one, ncclDataType_t type) {
      using T = decltype(one);
      return all_reduce(rank, std::vector<T>{one}, type, ncclSum)[0];
    };
    CHECK(sum(int8_t(-3), ncclInt8) == -6);
    CHECK(sum(uint8_t(130), ncclUint8) == 4);  // it wraps
    CHECK(sum(int32_t(-3), ncclInt32) == -6);
    CHECK(sum(uint32_t(3), ncclUint32) == 6);
    CHECK(sum(int64_t(1) << 40, ncclInt64) == int64_t(1) << 41);
    CHECK(sum(uint64_t(1) << 40, ncclUint64) == uint64_t(1) << 41);
    CHECK(sum(0.5, ncclFloat64) == 1.0);
    CHECK(__half2float(sum(__float2half(1.5f), ncclFloat16)) == 3.0f);
    CHECK(__bfloat162float(sum(__float2bfloat16(1.5f), ncclBfloat16)) == 3.0f);
    CHECK(all_reduce(rank, std::vector<int32_t>{3 + rank.rank}, ncclInt32, ncclAvg)[0] == 3);
  });
}

TEST_CASE("sends and receives of a group make progress together") {
  run_ranks(3, [](Rank& rank) {
    int next = (rank.rank + 1) % 3, before = (rank.rank + 2) % 3;
    size_t count = 50000;  // more than a chunk: a send alone would wait
    std::vector<float> values(count, static_cast<float>(rank.rank));
    CHECK(through(rank, values, count, [&](const float* send, float* receive) {
            ncclGroupStart();
            ncclSend(send, count, ncclFloat32, next, rank.comm, rank.stream);
            ncclRecv(receive, count, ncclFloat32, before, rank.comm, rank.stream);
            return ncclGroupEnd();
          }) == std::vector<float>(count, static_cast<float>(before)));
    // A gather to rank 0, which sends to itself as well.
    std::vector<float> gathered = through(rank, values, 3, [&](const float* send, float* receive) {
      ncclGroupStart();
      ncclSend(send, 1, ncclFloat32, 0, rank.comm, rank.stream);
      for (int peer = 0; peer < 3 && rank.rank == 0; ++peer)
        ncclRecv(receive + peer, 1, ncclFloat32, peer, rank.comm, rank.stream);
      return ncclGroupEnd();
    });
    if (rank.rank == 0) CHECK(gathered == std::vector<float>{0, 1, 2});
  });
}

TEST_CASE("ranks that disagree get errors") {
  auto fails = [](auto&& call) {
    run_ranks(2, [&](Rank& rank) {
      float* memory = on_device<float>({1, 2, 3, 4}, rank.stream);
      CHECK(call(rank, memory) == ncclSuccess);
      need(cudaStreamSynchronize(rank.stream));
      CHECK(rank.error() != ncclSuccess);
      CHECK(ncclAllReduce(memory, memory, 1, ncclFloat32, ncclSum, rank.comm, rank.stream) == rank.error());
      CHECK(std::string(ncclGetLastError(rank.comm)).find("has failed before") != std::string::npos);
      need(cudaFreeAsync(memory, rank.stream));
    });
  };
  fails([](Rank& rank, float* memory) {
    size_t count = rank.rank == 0 ? 4 : 3;
    return ncclAllReduce(memory, memory, count, ncclFloat32, ncclSum, rank.comm, rank.stream);
  });
  fails([](Rank& rank, float* memory) {
    ncclDataType_t type = rank.rank == 0 ? ncclFloat32 : ncclInt32;
    return ncclAllReduce(memory, memory, 4, type, ncclSum, rank.comm, rank.stream);
  });
  fails([](Rank& rank, float* memory) {
    ncclRedOp_t operation = rank.rank == 0 ? ncclSum : ncclAvg;
    return ncclAllReduce(memory, memory, 4, ncclFloat32, operation, rank.comm, rank.stream);
  });
  fails([](Rank& rank, float* memory) {
    return ncclBroadcast(memory, memory, 4, ncclFloat32, rank.rank, rank.comm, rank.stream);
  });
  fails([](Rank& rank, float* memory) {
    return rank.rank == 0 ? ncclSend(memory, 4, ncclFloat32, 1, rank.comm, rank.stream)
                          : ncclRecv(memory, 3, ncclFloat32, 0, rank.comm, rank.stream);
  });
}

TEST_CASE("a rank that waits for another goes on when it aborts") {
  std::promise<void> given_up;
  run_ranks(2, [&](Rank& rank) {
    if (rank.rank == 1) return given_up.get_future().wait();
    float* memory = on_device<float>({1}, rank.stream);
    CHECK(ncclAllReduce(memory, memory, 1, ncclFloat32, ncclSum, rank.comm, rank.stream) == ncclSuccess);
    usleep(50000);
    CHECK(cudaStreamQuery(rank.stream) == cudaErrorNotReady);
    CHECK(rank.error() == ncclSuccess);  // no error by itself
    CHECK(ncclCommAbort(rank.comm) == ncclSuccess);
    rank.comm = nullptr;
    CHECK(cudaStreamSynchronize(rank.stream) == cudaSuccess);
    need(cudaFreeAsync(memory, rank.stream));
    given_up.set_value();
  });
}

TEST_CASE("a communicator that does not block is asked until it is ready") {
  ncclUniqueId id = {};
  REQUIRE(ncclGetUniqueId(&id) == ncclSuccess);
  auto wait = [](ncclComm_t comm) {
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) {
      CHECK(ncclCommGetAsyncError(comm, &state) == ncclSuccess);
      usleep(1000);
    }
    return state;
  };
  auto body = [&](int rank) {
    need(cudaSetDevice(rank));
    cudaStream_t stream = make_stream();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm = nullptr;
    float* memory = on_device<float>({1}, stream);
    CHECK(ncclCommInitRankConfig(&comm, 2, id, rank, &config) == ncclInProgress);
    CHECK(wait(comm) == ncclSuccess);
    auto reduce = [&] { return ncclAllReduce(memory, memory, 1, ncclFloat32, ncclSum, comm, stream); };
    CHECK(reduce() == ncclInProgress);
    CHECK(reduce() == ncclInvalidArgument);  // too early
    CHECK(wait(comm) == ncclSuccess);
    CHECK(on_host(memory, 1, stream)[0] == 2);
    CHECK(ncclCommFinalize(comm) == ncclSuccess);
    CHECK(ncclCommDestroy(comm) == ncclSuccess);
    need(cudaFreeAsync(memory, stream));
    need(cudaStreamSynchronize(stream));
    need(cudaStreamDestroy(stream));
  };
  std::thread other([&] { body(1); });
  std::thread one([&] { body(0); });
  other.join();
  one.join();
  ncclConfig_t plain = {};
  ncclComm_t comm = nullptr;
  CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &plain) == ncclInvalidArgument);
}

TEST_CASE("collectives are captured and replayed") {
  run_ranks(2, [](Rank& rank) {
    float* memory = on_device<float>({1}, rank.stream);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    need(cudaStreamSynchronize(rank.stream));
    need(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal));
    CHECK(ncclAllReduce(memory, memory, 1, ncclFloat32, ncclSum, rank.comm, rank.stream) == ncclSuccess);
    need(cudaStreamEndCapture(rank.stream, &graph));
    need(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; ++i) need(cudaGraphLaunch(exec, rank.stream));
    CHECK(on_host(memory, 1, rank.stream)[0] == 8);
    need(cudaGraphExecDestroy(exec));
    need(cudaGraphDestroy(graph));
    need(cudaFreeAsync(memory, rank.stream));
  });
}

TEST_CASE("communicators of one process, one a device") {
  int devices[] = {2, 1}, same[] = {1, 1};
  ncclComm_t comms[2] = {};
  CHECK(ncclCommInitAll(comms, 2, same) == ncclInvalidUsage);
  for (ncclComm_t comm : comms) ncclCommAbort(comm);
  REQUIRE(ncclCommInitAll(comms, 2, devices) == ncclSuccess);
  float* memory[2] = {};
  cudaStream_t streams[2] = {};
  CHECK(ncclGroupStart() == ncclSuccess);
  for (int i = 0; i < 2; ++i) {
    need(cudaSetDevice(devices[i]));
    streams[i] = make_stream();
    memory[i] = on_device<float>({1}, streams[i]);
    CHECK(ncclAllReduce(memory[i], memory[i], 1, ncclFloat32, ncclSum, comms[i], streams[i]) == ncclSuccess);
  }
  CHECK(ncclAllReduce(memory[0], memory[0], 1, ncclFloat32, ncclSum, comms[0], streams[1]) == ncclInvalidUsage);
  CHECK(ncclAllReduce(memory[0], memory[0], 1, ncclFloat8e4m3, ncclSum, comms[0], streams[0]) == ncclInvalidArgument);
  CHECK(ncclGroupEnd() == ncclSuccess);
  CHECK(ncclGroupEnd() == ncclInvalidUsage);
  for (int i = 0; i < 2; ++i) {
    CHECK(on_host(memory[i], 1, streams[i])[0] == 2);
    need(cudaFreeAsync(memory[i], streams[i]));
    CHECK(ncclCommDestroy(comms[i]) == ncclSuccess);
    need(cudaStreamDestroy(streams[i]));
  }
  need(cudaSetDevice(0));
}

TEST_CASE("memory is registered if it comes from NCCL, and on all ranks") {
  run_ranks(2, [](Rank& rank) {
    void *memory = nullptr, *plain = nullptr, *handle = nullptr;
    ncclWindow_t window = nullptr;
    CHECK(ncclMemAlloc(&memory, 8192) == ncclSuccess);
    need(cudaMalloc(&plain, 8192));
    need(cudaMemsetAsync(memory, 0, 8192, rank.stream));
    auto* floats = static_cast<float*>(memory);
    CHECK(ncclCommRegister(rank.comm, plain, 8192, &handle) == ncclInvalidArgument);
    CHECK(ncclCommRegister(rank.comm, memory, 8192, &handle) == ncclSuccess);
    CHECK(ncclMemFree(memory) == ncclInvalidUsage);
    CHECK(ncclCommDeregister(rank.comm, handle) == ncclSuccess);
    CHECK(ncclCommDeregister(rank.comm, handle) == ncclInvalidArgument);
    CHECK(ncclCommWindowRegister(rank.comm, memory, 8192, &window, 2) == ncclInvalidArgument);
    CHECK(ncclCommWindowRegister(rank.comm, floats + 1, 64, &window, 0) == ncclInvalidArgument);
    CHECK(ncclCommWindowRegister(rank.comm, memory, 8192, &window, NCCL_WIN_COLL_SYMMETRIC) == ncclSuccess);
    auto reduce = [&] {
      CHECK(ncclAllReduce(floats, floats, 2048, ncclFloat32, ncclSum, rank.comm, rank.stream) == ncclSuccess);
      need(cudaStreamSynchronize(rank.stream));
      return rank.error();
    };
    CHECK(reduce() == ncclSuccess);
    if (rank.rank == 0) CHECK(ncclCommWindowDeregister(rank.comm, window) == ncclSuccess);
    CHECK(reduce() == ncclInvalidUsage);
    if (rank.rank == 1) CHECK(ncclCommWindowDeregister(rank.comm, window) == ncclSuccess);
    CHECK(ncclMemFree(memory) == ncclSuccess);
    need(cudaFree(plain));
  });
}
