// Kernels written once: structs with a call operator that run as CUDA kernels under nvcc, and as loops on the stream's
// thread when the file is compiled as C++ for the tests' double of CUDA. Structs, not lambdas, which nvcc would
// restrict.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include <tandem/tensor/compiler.h>
#include <tandem/tensor/cuda/runtime.h>

#if defined(__CUDACC__)
#define TANDEM_DEVICE __device__
#else
#define TANDEM_DEVICE
#include <tandem/tensor/callable.h>
#endif

namespace tandem::cuda {

// How a team combines values.
struct Sum {
  template <class T>
  TANDEM_HD T operator()(T a, T b) const {
    return static_cast<T>(a + b);
  }
};
struct Max {  // the first NaN wins
  template <class T>
  TANDEM_HD T operator()(T a, T b) const {
    return a > b || a != a ? a : b;
  }
};
struct Min {
  template <class T>
  TANDEM_HD T operator()(T a, T b) const {
    return a < b || a != a ? a : b;
  }
};

inline constexpr int kStrip = 32;  // columns that a team combines side by side

#if defined(__CUDACC__)

inline constexpr int kTeam = 128;  // threads of a team

/// The threads that work on one team's share together: a block. Every thread makes the same calls.
struct Team {
  /// body(i) for each i in [0, n), shared between the threads; all are done when it returns.
  template <class Body>
  __device__ void loop(std::int64_t n, Body body) const {
    for (std::int64_t i = threadIdx.x; i < n; i += kTeam) body(i);
    __syncthreads();
  }
  /// combine(initial, value(0), ..., value(n - 1)) in one fixed order; every thread has the result.
  template <class T, class Combine, class Value>
  __device__ T reduce(std::int64_t n, T initial, Combine combine, Value value) const {
    __shared__ T shared[kTeam / 32];
    T mine = initial;
    for (std::int64_t i = threadIdx.x; i < n; i += kTeam) mine = combine(mine, value(i));
    for (int lane = 16; lane > 0; lane /= 2)
      mine = combine(mine, static_cast<T>(__shfl_xor_sync(0xffffffffU, mine, lane)));  // a byte comes back as int
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
    __syncthreads();
    T total = shared[0];
    for (int warp = 1; warp < kTeam / 32; ++warp) total = combine(total, shared[warp]);
    __syncthreads();
    return total;
  }
  /// store(j, combine(initial, value(0, j), ..., value(n - 1, j))) for each j in [0, columns), at most kStrip, in one
  /// fixed order; threads side by side have columns side by side.
  template <class T, class Combine, class Value, class Store>
  __device__ void reduce_columns(std::int64_t n, int columns, T initial, Combine combine, Value value,
                                 Store store) const {
    constexpr int kParts = kTeam / kStrip;
    __shared__ T shared[kParts][kStrip];
    const int column = threadIdx.x % kStrip, part = threadIdx.x / kStrip;
    T mine = initial;
    if (column < columns) {
#pragma unroll 8
      for (std::int64_t i = part; i < n; i += kParts) mine = combine(mine, value(i, column));
    }
    shared[part][column] = mine;
    __syncthreads();
    if (part == 0 && column < columns) {
      for (int p = 1; p < kParts; ++p) mine = combine(mine, shared[p][column]);
      store(column, mine);
    }
    __syncthreads();
  }
  /// body() on one thread.
  template <class Body>
  __device__ void once(Body body) const {
    if (threadIdx.x == 0) body();
  }
};

template <class Body>
__global__ void index_kernel(std::int64_t n, const Body body) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) body(i);
}
template <class Body>
__global__ void __launch_bounds__(kTeam) team_kernel(std::int64_t teams, const Body body) {
  for (std::int64_t team = blockIdx.x; team < teams; team += gridDim.x) body(Team(), team);
}

/// body(i) for each i in [0, n), in any order.
template <class Body>
void for_each_index(cudaStream_t stream, std::int64_t n, const Body& body) {
  if (n <= 0) return;
  constexpr std::int64_t kThreads = 256, kBlocks = 4096;
  const std::int64_t blocks = (n + kThreads - 1) / kThreads;
  index_kernel<<<static_cast<unsigned>(blocks < kBlocks ? blocks : kBlocks), kThreads, 0, stream>>>(n, body);
  check_status(cudaGetLastError(), "cuda");
}
/// body(Team, t) for each t in [0, teams), in any order.
template <class Body>
void for_each_team(cudaStream_t stream, std::int64_t teams, const Body& body) {
  if (teams <= 0) return;
  constexpr std::int64_t kBlocks = 65535;
  team_kernel<<<static_cast<unsigned>(teams < kBlocks ? teams : kBlocks), kTeam, 0, stream>>>(teams, body);
  check_status(cudaGetLastError(), "cuda");
}

#else

/// Runs `body` on the stream's thread; a part of the tests' double of CUDA.
void launch_on_host(cudaStream_t stream, UniqueFunction<void()> body);

struct Team {
  template <class Body>
  void loop(std::int64_t n, Body body) const {
    for (std::int64_t i = 0; i < n; ++i) body(i);
  }
  template <class T, class Combine, class Value>
  T reduce(std::int64_t n, T initial, Combine combine, Value value) const {
    for (std::int64_t i = 0; i < n; ++i) initial = combine(initial, value(i));
    return initial;
  }
  template <class T, class Combine, class Value, class Store>
  void reduce_columns(std::int64_t n, int columns, T initial, Combine combine, Value value, Store store) const {
    for (int j = 0; j < columns; ++j) {
      T total = initial;
      for (std::int64_t i = 0; i < n; ++i) total = combine(total, value(i, j));
      store(j, total);
    }
  }
  template <class Body>
  void once(Body body) const {
    body();
  }
};

template <class Body>
void for_each_index(cudaStream_t stream, std::int64_t n, const Body& body) {
  if (n <= 0) return;
  launch_on_host(stream, [n, body] {
    for (std::int64_t i = 0; i < n; ++i) body(i);
  });
}
template <class Body>
void for_each_team(cudaStream_t stream, std::int64_t teams, const Body& body) {
  if (teams <= 0) return;
  launch_on_host(stream, [teams, body] {
    for (std::int64_t t = 0; t < teams; ++t) body(Team(), t);
  });
}

#endif

}  // namespace tandem::cuda
