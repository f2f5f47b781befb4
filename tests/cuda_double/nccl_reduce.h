// The arithmetic of NCCL's reductions.
#pragma once
#include <nccl.h>

#include <cstddef>
#include <vector>

namespace cuda_double {

/// Bytes of an element; 0 for types that are not modelled.
size_t width_of(ncclDataType_t type);

/// Combines one piece of each rank, in the order of ranks: the same bits wherever it is done. Sums of floating point
/// are taken in float64 and rounded once.
void combine(ncclDataType_t type, ncclRedOp_t operation, const std::vector<const void*>& pieces, size_t count,
             void* out);

}  // namespace cuda_double
