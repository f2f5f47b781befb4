// Functions that make tensors: filled, from values, counting, and random.
#pragma once
#include <initializer_list>
#include <span>
#include <type_traits>
#include <vector>

#include <tandem/tensor/tensor.h>

namespace tandem {

/// Uninitialised memory.
Tensor empty(const Shape& shape, const TensorOptions& options = {});
Tensor zeros(const Shape& shape, const TensorOptions& options = {});
Tensor ones(const Shape& shape, const TensorOptions& options = {});
/// Without a dtype: float32 for a real value, int64 for an integer, bool for a bool.
Tensor full(const Shape& shape, Scalar value, const TensorOptions& options = {});
/// 0, 1, ..., end - 1 (exclusive). int64 unless an argument is real.
Tensor arange(Scalar end, const TensorOptions& options = {});
/// start, start + step, ... below end (above it for a negative step).
Tensor arange(Scalar start, Scalar end, Scalar step = 1, const TensorOptions& options = {});
/// The identity matrix {n, n}.
Tensor eye(int64_t n, const TensorOptions& options = {});

/// Same shape, dtype and device as x unless options say otherwise.
Tensor empty_like(const Tensor& x);
Tensor zeros_like(const Tensor& x);
Tensor ones_like(const Tensor& x);
Tensor full_like(const Tensor& x, Scalar value);
Tensor rand_like(const Tensor& x);
Tensor randn_like(const Tensor& x);

/// Nested lists of numbers, as in tensor({{1, 2}, {3, 4}}).
class Nested {
 public:
  template <class T>
  requires std::is_arithmetic_v<T> Nested(T value) : value_(value) {}
  Nested(std::initializer_list<Nested> items) : value_(0), is_list_(true), items_(items) {}

 private:
  friend Tensor tensor(const Nested& values, const TensorOptions& options);
  Scalar value_;
  bool is_list_ = false;
  std::vector<Nested> items_;
};

/// A tensor of the given values. Without a dtype: float32 if any is real, else int64, or bool if all are bool.
/// Lists of different lengths at one level throw Error.
Tensor tensor(const Nested& values, const TensorOptions& options = {});

/// A copy of `values` with the given shape (by default a vector); without a dtype, that of T.
template <class T>
Tensor from_span(std::span<const T> values, const Shape& shape, const TensorOptions& options = {});
template <class T>
Tensor from_span(std::span<const T> values, const TensorOptions& options = {}) {
  return from_span(values, Shape{static_cast<int64_t>(values.size())}, options);
}
template <class T>
Tensor tensor(const std::vector<T>& values, const TensorOptions& options = {}) {
  return from_span(std::span<const T>(values), options);
}

/// Uniform in [0, 1).
Tensor rand(const Shape& shape, const TensorOptions& options = {});
/// Standard normal.
Tensor randn(const Shape& shape, const TensorOptions& options = {});
/// Integers from low (inclusive) to high (exclusive); int64 unless options say otherwise.
Tensor randint(int64_t low, int64_t high, const Shape& shape, const TensorOptions& options = {});
/// A random order of 0 .. n-1, int64.
Tensor randperm(int64_t n, const TensorOptions& options = {});

namespace detail {
Tensor copy_values(const void* values, std::size_t count, DType dtype, const Shape& shape,
                   const TensorOptions& options);
}  // namespace detail

template <class T>
Tensor from_span(std::span<const T> values, const Shape& shape, const TensorOptions& options) {
  return detail::copy_values(values.data(), values.size(), dtype_of<T>, shape, options);
}

}  // namespace tandem
