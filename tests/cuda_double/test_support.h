// What the tests of the double share: a stream with pinned and device memory, and a kernel launch.
#pragma once
#include <cuda_runtime_api.h>
#include <doctest/doctest.h>
#include <tandem/tensor/callable.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "children.h"

namespace tandem::cuda {
void launch_on_host(cudaStream_t stream, UniqueFunction<void()> body);
}

namespace cuda_double_test {

using tandem::cuda::launch_on_host;

/// Ends the process where the preparation of a test or of a child fails.
inline void need(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "preparation failed: %s\n", cudaGetErrorString(error));
  std::abort();
}

inline cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

inline cudaEvent_t make_event(unsigned flags = cudaEventDisableTiming) {
  cudaEvent_t event = nullptr;
  need(cudaEventCreateWithFlags(&event, flags));
  return event;
}

template <class T>
T* device_array(size_t count, cudaStream_t stream) {
  void* pointer = nullptr;
  need(cudaMallocAsync(&pointer, count * sizeof(T), stream));
  return static_cast<T*>(pointer);
}

template <class T>
T* pinned_array(size_t count) {
  void* pointer = nullptr;
  need(cudaHostAlloc(&pointer, count * sizeof(T), cudaHostAllocDefault));
  return static_cast<T*>(pointer);
}

/// Device memory with these values; they are there when the call returns.
template <class T>
T* on_device(const std::vector<T>& values, cudaStream_t stream) {
  T* memory = device_array<T>(values.size(), stream);
  need(cudaMemcpyAsync(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
  return memory;
}

template <class T>
std::vector<T> on_host(const T* memory, size_t count, cudaStream_t stream) {
  std::vector<T> values(count);
  need(cudaMemcpyAsync(values.data(), memory, count * sizeof(T), cudaMemcpyDeviceToHost, stream));
  need(cudaStreamSynchronize(stream));
  return values;
}

}  // namespace cuda_double_test
