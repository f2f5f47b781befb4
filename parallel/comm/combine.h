// combine: the one place where values of several ranks become one, so that bits are equal on every backend.
#pragma once
#include <cstdint>
#include <span>

#include <tandem/parallel/comm/collective.h>

namespace tandem::parallel {

/// Combines `count` elements of all ranks' `parts`, rank 0's first, and writes the result to each of `outputs`. An
/// output may be one of the parts, but must not overlap any otherwise. The ranks are combined in a balanced binary tree
/// whose left half is the larger; avg divides by their number at the end. Integers wrap; a NaN stays in min and max;
/// 16-bit floats are combined in float32 and rounded once.
void combine(DType dtype, ReduceOp op, std::span<const void* const> parts, std::span<void* const> outputs,
             std::int64_t count);
/// Divides floating-point values that are kept in their own precision, as avg does at its end.
void divide(DType dtype, void* values, int by, std::int64_t count);

}  // namespace tandem::parallel
