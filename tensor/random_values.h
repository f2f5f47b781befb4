// The values that a Philox block makes, the same on every kind of device: four float32 values, or two of another type.
#pragma once
#include <cmath>
#include <type_traits>

#include <tandem/tensor/backend.h>

namespace tandem {

template <class T>
inline constexpr int kPerBlock = std::is_same_v<T, float> ? 4 : 2;

TANDEM_HD inline std::uint64_t random_word(const Philox4& bits, int i) {
  return (std::uint64_t{bits.x[2 * i + 1]} << 32) | bits.x[2 * i];
}

/// Value `i` of a block, uniform in [0, 1) with all the bits that T holds.
template <class T>
TANDEM_HD T uniform_value(const Philox4& bits, int i) {
  if constexpr (std::is_same_v<T, float>)
    return static_cast<float>(bits.x[i] >> 8) * 0x1p-24F;
  else
    return static_cast<T>(static_cast<double>(random_word(bits, i) >> 11) * 0x1p-53);
}

/// Values 2i and 2i+1 of a block by Box and Muller's transform.
template <class T>
TANDEM_HD void normal_pair(const Philox4& bits, int i, T* out) {
  const T u = T(1) - uniform_value<T>(bits, 2 * i), v = uniform_value<T>(bits, 2 * i + 1);  // u in (0, 1]
  const T radius = std::sqrt(T(-2) * std::log(u)), angle = T(6.283185307179586476925) * v;
  out[0] = radius * std::cos(angle);
  out[1] = radius * std::sin(angle);
}

/// All kPerBlock<T> values of a block; see Backend::random. Only integers are drawn for a T that is not a real type.
template <class T>
TANDEM_HD void random_values(RandomKind kind, double low, double high, const Philox4& bits, T* values) {
  constexpr int n = kPerBlock<T>;
  for (int i = 0; i < n; ++i) {
    if (kind == RandomKind::integers) {
      const auto range = static_cast<std::uint64_t>(static_cast<std::int64_t>(high) - static_cast<std::int64_t>(low));
      const std::uint64_t r = n == 4 ? std::uint64_t{bits.x[i]} : random_word(bits, i % 2);
      values[i] = static_cast<T>(static_cast<std::int64_t>(low) + static_cast<std::int64_t>(r % range));
    } else if constexpr (std::is_floating_point_v<T>) {
      if (kind == RandomKind::uniform)
        values[i] = uniform_value<T>(bits, i);
      else if (kind == RandomKind::keep_mask)
        values[i] = uniform_value<T>(bits, i) < static_cast<T>(low) ? T(0) : static_cast<T>(1.0 / (1.0 - low));
      else if (i % 2 == 0)
        normal_pair<T>(bits, i / 2, values + i);
    }
  }
}

}  // namespace tandem
