// Where element i of each of N views of one shape lies: dimensions are merged where they are dense in every view, so
// that most loops have one.
#pragma once
#include <cstdint>

#include <tandem/tensor/compiler.h>
#include <tandem/tensor/view.h>

namespace tandem::cuda {

template <int N>
struct Places {
  int dims = 0;
  std::int64_t shape[kMaxDims] = {};
  std::int64_t strides[N][kMaxDims] = {};  // in bytes
  char* data[N] = {};

  /// The addresses of element `i`, in row-major order.
  TANDEM_HD void at(std::int64_t i, char* (&address)[N]) const {
    for (int k = 0; k < N; ++k) address[k] = data[k];
    for (int d = dims - 1; d >= 0; --d) {
      const std::int64_t index = d == 0 ? i : i % shape[d];
      if (d > 0) i /= shape[d];
      for (int k = 0; k < N; ++k) address[k] += index * strides[k][d];
    }
  }
};

template <class T>
TANDEM_HD T& value_at(char* address) {
  return *reinterpret_cast<T*>(address);
}

/// `views` point to N views of one shape.
template <int N>
Places<N> places(const View* const (&views)[N]) {
  Places<N> p;
  for (int k = 0; k < N; ++k) p.data[k] = static_cast<char*>(views[k]->data);
  for (int i = 0; i < views[0]->dims; ++i) {
    const std::int64_t size = views[0]->shape[i];
    if (size == 1) continue;
    const auto stride = [&](int k) {
      return views[k]->strides[i] * static_cast<std::int64_t>(size_of(views[k]->dtype));
    };
    bool merge = p.dims > 0;
    for (int k = 0; k < N && merge; ++k) merge = p.strides[k][p.dims - 1] == stride(k) * size;
    const int at = merge ? p.dims - 1 : p.dims++;
    p.shape[at] = merge ? p.shape[at] * size : size;
    for (int k = 0; k < N; ++k) p.strides[k][at] = stride(k);
  }
  return p;
}

}  // namespace tandem::cuda
