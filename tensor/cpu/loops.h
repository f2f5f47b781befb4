// Loops over N views of one shape: dimensions are merged where they are dense in every view, so that most loops are a
// single run; what is left is an outer loop over rows.
#pragma once
#include <array>
#include <cstdint>

#include <tandem/tensor/threads.h>
#include <tandem/tensor/view.h>

namespace tandem::cpu {

inline constexpr std::int64_t kGrain = 32'768;  // elements that are worth a thread of their own

template <std::size_t N>
struct Loop {
  int dims = 0;
  std::int64_t shape[kMaxDims] = {};
  std::int64_t strides[N][kMaxDims] = {};  // in bytes
  char* data[N] = {};
};

template <std::size_t N>
Loop<N> merge_dims(const std::array<const View*, N>& views) {
  Loop<N> loop;
  for (std::size_t k = 0; k < N; ++k) loop.data[k] = static_cast<char*>(views[k]->data);
  for (int i = 0; i < views[0]->dims; ++i) {
    const std::int64_t size = views[0]->shape[i];
    if (size == 1) continue;
    bool merge = loop.dims > 0;
    for (std::size_t k = 0; k < N && merge; ++k) {
      const auto bytes = static_cast<std::int64_t>(size_of(views[k]->dtype));
      merge = loop.strides[k][loop.dims - 1] == views[k]->strides[i] * bytes * size;
    }
    const int at = merge ? loop.dims - 1 : loop.dims++;
    loop.shape[at] = merge ? loop.shape[at] * size : size;
    for (std::size_t k = 0; k < N; ++k)
      loop.strides[k][at] = views[k]->strides[i] * static_cast<std::int64_t>(size_of(views[k]->dtype));
  }
  if (loop.dims == 0) {
    loop.dims = 1;
    loop.shape[0] = 1;
  }
  return loop;
}

/// Calls inner(n, pointers, byte strides) for each innermost run; the runs are shared between the device's threads.
template <std::size_t N, class Inner>
void for_each_run(const std::array<const View*, N>& views, const Inner& inner) {
  const Loop<N> loop = merge_dims(views);
  const int last = loop.dims - 1;
  const std::int64_t run = loop.shape[last];
  std::int64_t rows = 1;
  for (int i = 0; i < last; ++i) rows *= loop.shape[i];
  if (rows == 0 || run == 0) return;
  std::array<std::int64_t, N> step;
  for (std::size_t k = 0; k < N; ++k) step[k] = loop.strides[k][last];
  if (rows == 1) {
    parallel_for(run, kGrain, [&](std::int64_t begin, std::int64_t end) {
      std::array<char*, N> at;
      for (std::size_t k = 0; k < N; ++k) at[k] = loop.data[k] + begin * step[k];
      inner(end - begin, at, step);
    });
    return;
  }
  parallel_for(rows, std::max<std::int64_t>(1, kGrain / run), [&](std::int64_t begin, std::int64_t end) {
    std::int64_t index[kMaxDims] = {};
    std::array<char*, N> at;
    for (std::size_t k = 0; k < N; ++k) at[k] = loop.data[k];
    for (std::int64_t rest = begin, i = last - 1; i >= 0; --i) {
      index[i] = rest % loop.shape[i];
      rest /= loop.shape[i];
      for (std::size_t k = 0; k < N; ++k) at[k] += index[i] * loop.strides[k][i];
    }
    for (std::int64_t row = begin; row < end; ++row) {
      inner(run, at, step);
      for (int i = last - 1; i >= 0; --i) {
        for (std::size_t k = 0; k < N; ++k) at[k] += loop.strides[k][i];
        if (++index[i] < loop.shape[i]) break;
        for (std::size_t k = 0; k < N; ++k) at[k] -= loop.shape[i] * loop.strides[k][i];
        index[i] = 0;
      }
    }
  });
}

template <class T>
T& element(char* base, std::int64_t i, std::int64_t step) {
  return *reinterpret_cast<T*>(base + i * step);
}

}  // namespace tandem::cpu
