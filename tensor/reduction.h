// What reductions on every device have in common: how values are combined, and which dimensions are kept or reduced.
#pragma once
#include <cstdint>
#include <limits>
#include <type_traits>

#include <tandem/tensor/backend.h>
#include <tandem/tensor/compiler.h>

namespace tandem {

/// How one kind combines values of type T: `Acc` holds running totals, `Lane` the values inside a block.
template <class T, ReduceKind Kind>
struct Reducer {
  static constexpr bool kIsSum = Kind == ReduceKind::sum || Kind == ReduceKind::sum_squares;
  using Lane = std::conditional_t<!kIsSum || std::is_floating_point_v<T>, T, std::int64_t>;
  using Acc = std::conditional_t<!kIsSum, T, std::conditional_t<std::is_floating_point_v<T>, double, std::int64_t>>;
  TANDEM_HD static constexpr Acc identity() {
    if constexpr (kIsSum)
      return Acc(0);
    else if constexpr (std::numeric_limits<T>::has_infinity)
      return Kind == ReduceKind::max ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::infinity();
    else
      return Kind == ReduceKind::max ? std::numeric_limits<T>::lowest() : std::numeric_limits<T>::max();
  }
  template <class V>
  TANDEM_HD static V combine(V a, V b) {
    if constexpr (kIsSum)
      return V(a + b);
    else if constexpr (Kind == ReduceKind::max)
      return a > b || a != a ? a : b;
    else
      return a < b || a != a ? a : b;
  }
  TANDEM_HD static Lane load(T x) {
    if constexpr (Kind == ReduceKind::sum_squares)
      return Lane(x) * Lane(x);
    else
      return Lane(x);
  }
};

/// Some dimensions of x, each with the strides of x and of the result; those that are dense in both are merged.
struct ReducePart {
  int dims = 0;
  std::int64_t shape[kMaxDims] = {}, x[kMaxDims] = {}, to[kMaxDims] = {};
  std::int64_t count = 1;

  void add(std::int64_t size, std::int64_t x_stride, std::int64_t to_stride) {
    count *= size;
    if (size == 1) return;
    if (dims > 0 && x[dims - 1] == x_stride * size && to[dims - 1] == to_stride * size) {
      shape[dims - 1] *= size;
      x[dims - 1] = x_stride;
      to[dims - 1] = to_stride;
      return;
    }
    shape[dims] = size;
    x[dims] = x_stride;
    to[dims++] = to_stride;
  }
  struct Offsets {
    std::int64_t x = 0, to = 0;
  };
  /// The offsets of the i-th index in row-major order, over the first `n` dimensions.
  TANDEM_HD Offsets at(std::int64_t i, int n) const {
    if (n == 0) return {};
    return n == 1 ? Offsets{i * x[0], i * to[0]} : divided(i, n);
  }

 private:
  // Out of line, so that a GPU's loops are unrolled without it.
  [[gnu::noinline]] TANDEM_HD Offsets divided(std::int64_t i, int n) const {
    Offsets offsets;
    for (int d = n - 1; d >= 0; --d) {
      const std::int64_t k = d == 0 ? i : i % shape[d];
      if (d > 0) i /= shape[d];
      offsets.x += k * x[d];
      offsets.to += k * to[d];
    }
    return offsets;
  }
};

/// The dimensions of x that the result keeps, and those that it has with size 1.
struct ReduceParts {
  ReducePart kept, reduced;
  ReduceParts(const View& from, const View& to) {
    for (int i = 0; i < from.dims; ++i) {
      if (to.shape[i] == 1 && from.shape[i] != 1)
        reduced.add(from.shape[i], from.strides[i], 0);
      else
        kept.add(from.shape[i], from.strides[i], to.strides[i]);
    }
  }
};

}  // namespace tandem
