// What the functions share: views for kernels, and the way back from a broadcast.
#pragma once
#include <tandem/autograd/functions.h>
#include <tandem/autograd/node.h>
#include <tandem/tensor/backend.h>
#include <tandem/tensor/create.h>

namespace tandem::autograd {

/// An uninitialised tensor beside `like`.
inline Tensor empty_beside(const Tensor& like, const Shape& shape, DType dtype) {
  return empty(shape, {.dtype = dtype, .device = like.device()});
}
/// The tensor's data seen in a shape that it broadcasts to.
View broadcast_view(const Tensor& t, const Shape& shape);
/// Sums a gradient over the dimensions that broadcasting stretched; the way back to `shape`.
Tensor sum_to(const Tensor& gradient, const Shape& shape);
/// A single-number tensor for `value` as an operand beside `other`.
Tensor scalar_tensor(Scalar value, const Tensor& other);
/// 0 for bool, 1 for integers, 2 for reals.
inline int kind(DType d) { return d == boolean ? 0 : is_integral(d) ? 1 : 2; }
/// Throws Error unless x is float32 or float64.
inline void check_real(std::string_view op, const Tensor& x) {
  check(is_real(x.dtype()), op, "is defined on float32 and float64; this tensor is {}: convert it with .to(float32)",
        x.dtype());
}

}  // namespace tandem::autograd
