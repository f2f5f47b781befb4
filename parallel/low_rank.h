// Thin matrices of float32 or float64 in the memory of the CPU, as PowerSGD uses them.
#pragma once
#include <tandem/tensor/tensor.h>

namespace tandem::parallel {

// Note [Same bits]: what every rank computes from the sums, and all must have the same, is computed by plain loops in
// double or in the type of the gradient: their bits depend neither on the number of threads nor on the type of CPU,
// which may differ between ranks. What is summed up afterwards is computed by matmul.

/// Makes the columns of `a` {n, rank} orthonormal, one after the other. A column without a direction of its own becomes
/// that of `spare`, or zeros without one. False, and nothing is changed, when a value is not finite.
bool orthonormalise(Tensor& a, const Tensor* spare = nullptr);

/// m = p q^T, of m {rows, cols}, p {rows, rank} and q^T {rank, cols}, all dense; what m has had beside that goes to
/// `error` {rows, cols}, if there is one.
void replace_by_product(Tensor& m, Tensor* error, const Tensor& p, const Tensor& q_transposed);

}  // namespace tandem::parallel
