// Ranks for the tests of the double's NCCL.
#pragma once
#include <nccl.h>

#include <thread>
#include <vector>

#include "test_support.h"

namespace cuda_double_test {

/// A rank with its own stream, on the device of its number.
struct Rank {
  int rank = 0, ranks = 1;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;

  Rank(int number, int count, ncclUniqueId id) : rank(number), ranks(count) {
    need(cudaSetDevice(rank));
    stream = make_stream();
    if (ncclCommInitRank(&comm, ranks, id, rank) != ncclSuccess) need(cudaErrorUnknown);
  }
  ~Rank() {
    if (comm) ncclCommDestroy(comm);
    need(cudaStreamSynchronize(stream));
    need(cudaStreamDestroy(stream));
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  ncclResult_t error() const {
    ncclResult_t result = ncclSuccess;
    ncclCommGetAsyncError(comm, &result);
    return result;
  }
};

/// Runs the body as so many ranks, each a thread with a device.
template <class F>
void run_ranks(int ranks, F&& body) {
  ncclUniqueId id = {};
  if (ncclGetUniqueId(&id) != ncclSuccess) need(cudaErrorUnknown);
  std::vector<std::thread> threads;
  for (int i = 0; i < ranks; ++i)
    threads.emplace_back([&, i] {
      Rank rank(i, ranks, id);
      body(rank);
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace cuda_double_test
