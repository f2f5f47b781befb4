// The two 16-bit floating-point formats, for storage, checkpoints and the wire. Arithmetic is done in float32.
#pragma once
#include <bit>
#include <cstdint>

#include <tandem/tensor/compiler.h>

namespace tandem {

/// bfloat16: the upper half of a float32, rounded to nearest even.
struct BFloat16 {
  std::uint16_t bits = 0;
  BFloat16() = default;
  /// Rounds to nearest even; a NaN stays a NaN.
  TANDEM_HD explicit BFloat16(float value) {
    std::uint32_t u = std::bit_cast<std::uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<std::uint16_t>((u >> 16) | 0x40u);
    } else {
      bits = static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
  }
  TANDEM_HD explicit operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

/// IEEE 754 binary16: 5 exponent bits, 10 fraction bits; subnormals and infinities included.
struct Float16 {
  std::uint16_t bits = 0;
  Float16() = default;
  /// Rounds to nearest even; values from 65520 on become infinity.
  TANDEM_HD explicit Float16(float value) {
    const std::uint32_t u = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (u >> 16) & 0x8000u;
    const std::uint32_t magnitude = u & 0x7fffffffu;
    // All cases are computed and one is chosen, so that loops become vector code.
    const std::uint32_t rebased = magnitude - 0x38000000u;
    const std::uint32_t normal = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
    // Beside 0.5 a float32 counts in steps of 2^-24, as subnormal results do: the sum rounds.
    const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    std::uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // rounds to infinity
    half = magnitude > 0x7f800000u ? 0x7e00u : half;   // NaN
    bits = static_cast<std::uint16_t>(sign | half);
  }
  TANDEM_HD explicit operator float() const {
    const std::uint32_t magnitude = bits & 0x7fffu;
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t normal = (magnitude << 13) + (112u << 23);
    const std::uint32_t infinite = (magnitude << 13) | 0x7f800000u;  // or NaN
    // By way of int32, which converts in vector code.
    const auto subnormal =
        std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
    std::uint32_t u = magnitude < 0x400u ? subnormal : normal;
    u = magnitude >= 0x7c00u ? infinite : u;
    return std::bit_cast<float>(sign | u);
  }
};

}  // namespace tandem
