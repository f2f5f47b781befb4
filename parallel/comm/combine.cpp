#include <tandem/parallel/comm/combine.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include <tandem/tensor/compiler.h>

namespace tandem::parallel {
namespace {

constexpr std::int64_t kBlock = 1024;  // elements: a few blocks fit into the first-level cache

// What elements of type T are combined as.
template <class T>
struct Wide {
  using Type = T;
};
template <>
struct Wide<BFloat16> {
  using Type = float;
};
template <>
struct Wide<Float16> {
  using Type = float;
};

template <ReduceOp op, class T>
inline T apply(T a, T b) {
  if constexpr (op == ReduceOp::product) return a * b;
  if constexpr (op == ReduceOp::min) return a < b || a != a ? a : b;
  if constexpr (op == ReduceOp::max) return a > b || a != a ? a : b;
  return a + b;
}

template <ReduceOp op, class T>
TANDEM_CLONES void apply_all(std::int64_t n, const T* a, const T* b, T* out) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) out[i] = apply<op, T>(a[i], b[i]);
}

template <class T>
TANDEM_CLONES void divide_all(std::int64_t n, const T* a, T by, T* out) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) out[i] = a[i] / by;
}

template <class To, class From>
TANDEM_CLONES void convert_all(std::int64_t n, const From* from, To* to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(from[i]);
}

// Combines elements [first, first + n) of the parts lo .. hi-1. Returns where the result is: at `out`, or, of a single
// part, where that part is. `out` may be one of the parts: it is written last.
template <ReduceOp op, class T, class W>
const W* combine_tree(std::span<const void* const> parts, std::size_t lo, std::size_t hi, std::int64_t first,
                      std::int64_t n, W* out) {
  if (hi - lo == 1) {
    const T* part = static_cast<const T*>(parts[lo]) + first;
    if constexpr (std::is_same_v<T, W>) {
      return part;
    } else {
      convert_all(n, part, out);
      return out;
    }
  }
  W left_scratch[kBlock], right_scratch[kBlock];
  const std::size_t middle = lo + (hi - lo + 1) / 2;
  const W* left = combine_tree<op, T, W>(parts, lo, middle, first, n, left_scratch);
  const W* right = combine_tree<op, T, W>(parts, middle, hi, first, n, right_scratch);
  apply_all<op, W>(n, left, right, out);
  return out;
}

template <ReduceOp op, class T>
void combine_as(std::span<const void* const> parts, std::span<void* const> outputs, std::int64_t count) {
  using W = typename Wide<T>::Type;
  W scratch[kBlock];
  for (std::int64_t at = 0; at < count; at += kBlock) {
    const std::int64_t n = std::min(kBlock, count - at);
    W* to = scratch;
    if constexpr (std::is_same_v<T, W>) to = static_cast<T*>(outputs[0]) + at;
    const W* result = combine_tree<op, T, W>(parts, 0, parts.size(), at, n, to);
    if constexpr (op == ReduceOp::avg) {
      divide_all(n, result, static_cast<W>(parts.size()), to);
      result = to;
    }
    for (void* output : outputs) {
      T* out = static_cast<T*>(output) + at;
      if constexpr (std::is_same_v<T, W>) {
        if (out != result) std::memcpy(out, result, static_cast<std::size_t>(n) * sizeof(T));
      } else {
        convert_all(n, result, out);
      }
    }
  }
}

template <class T>
void combine_by(ReduceOp op, std::span<const void* const> parts, std::span<void* const> outputs, std::int64_t count) {
  switch (op) {
    case ReduceOp::sum:
      return combine_as<ReduceOp::sum, T>(parts, outputs, count);
    case ReduceOp::product:
      return combine_as<ReduceOp::product, T>(parts, outputs, count);
    case ReduceOp::min:
      return combine_as<ReduceOp::min, T>(parts, outputs, count);
    case ReduceOp::max:
      return combine_as<ReduceOp::max, T>(parts, outputs, count);
    case ReduceOp::avg:
      return combine_as<ReduceOp::avg, T>(parts, outputs, count);
  }
}

}  // namespace

void combine(DType dtype, ReduceOp op, std::span<const void* const> parts, std::span<void* const> outputs,
             std::int64_t count) {
  switch (dtype) {
    case DType::float32:
      return combine_by<float>(op, parts, outputs, count);
    case DType::float64:
      return combine_by<double>(op, parts, outputs, count);
    case DType::int64:
      return combine_by<std::int64_t>(op, parts, outputs, count);
    case DType::int32:
      return combine_by<std::int32_t>(op, parts, outputs, count);
    case DType::uint8:
    case DType::boolean:
      return combine_by<std::uint8_t>(op, parts, outputs, count);
    case DType::bfloat16:
      return combine_by<BFloat16>(op, parts, outputs, count);
    case DType::float16:
      return combine_by<Float16>(op, parts, outputs, count);
  }
}

void divide(DType dtype, void* values, int by, std::int64_t count) {
  if (dtype == DType::float32)
    divide_all(count, static_cast<float*>(values), static_cast<float>(by), static_cast<float*>(values));
  else if (dtype == DType::float64)
    divide_all(count, static_cast<double*>(values), static_cast<double>(by), static_cast<double*>(values));
}

}  // namespace tandem::parallel
