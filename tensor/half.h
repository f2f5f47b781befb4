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
    std::uint32_t half = 0;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u;  // NaN
    } else if (magnitude >= 0x477ff000u) {
      half = 0x7c00u;  // rounds to infinity
    } else if (magnitude >= 0x38800000u) {
      const std::uint32_t rebased = magnitude - 0x38000000u;
      half = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
    } else if (magnitude >= 0x33000000u) {  // subnormal result
      const std::uint32_t shift = 126u - (magnitude >> 23);
      const std::uint32_t fraction = (magnitude & 0x7fffffu) | 0x800000u;
      const std::uint32_t rounded = fraction >> shift;
      const std::uint32_t rest = fraction & ((1u << shift) - 1u);
      const std::uint32_t middle = 1u << (shift - 1u);
      half = rounded + ((rest > middle || (rest == middle && (rounded & 1u))) ? 1u : 0u);
    }
    bits = static_cast<std::uint16_t>(sign | half);
  }
  TANDEM_HD explicit operator float() const {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1fu;
    const std::uint32_t fraction = bits & 0x3ffu;
    if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
    if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (fraction << 13));
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
};

}  // namespace tandem
