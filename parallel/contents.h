// The contents of tensors as bits: their hash, and where two differ first. Bits are compared and not values: a NaN is
// equal to itself, and -0.0 is not 0.0.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include <tandem/tensor/tensor.h>

namespace tandem::parallel {

/// The same elements without history, dense, in memory that the host reads; a copy only where it must be.
Tensor readable(const Tensor& t);
/// The memory of a readable tensor.
std::span<const std::byte> bytes_of(const Tensor& t);
/// A 64-bit hash. Bytes that differ within one aligned word of eight alone never have the same; others do by chance.
std::uint64_t hash(std::span<const std::byte> bytes);
bool same_bits(const Tensor& a, const Tensor& b);

/// Where two tensors differ, and what each has there.
struct Difference {
  std::string place;         // "element (1, 2)", or "the value" of a single number
  std::string first, other;  // values; with their bits where they read alike
};
/// The first difference of two tensors of one shape and type.
std::optional<Difference> first_difference(const Tensor& a, const Tensor& b);

}  // namespace tandem::parallel
