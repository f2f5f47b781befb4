// Conversion of one value between any two element types.
#pragma once
#include <limits>
#include <type_traits>

#include <tandem/tensor/compiler.h>
#include <tandem/tensor/half.h>
#include <tandem/tensor/scalar.h>

namespace tandem {

/// Rounds as C++ does; reals beyond an integer type's range saturate, and NaN gives 0.
template <class To, class From>
TANDEM_HD To convert_value(From value) {
  if constexpr (std::is_same_v<To, From>)
    return value;
  else if constexpr (std::is_same_v<From, BFloat16> || std::is_same_v<From, Float16>)
    return convert_value<To>(float(value));
  else if constexpr (std::is_same_v<To, BFloat16> || std::is_same_v<To, Float16>)
    return To(static_cast<float>(value));
  else if constexpr (std::is_same_v<To, bool>)
    return value != From(0);
  else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    if (!(value == value)) return To(0);
    if (value <= static_cast<From>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
    if (value >= static_cast<From>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
    return static_cast<To>(value);
  } else
    return static_cast<To>(value);
}

/// A number from the program as an element.
template <class T>
T convert_scalar(Scalar value) {
  if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>)
    return T(value.to<float>());
  else
    return value.dtype() == float64 ? convert_value<T>(value.real()) : convert_value<T>(value.to<std::int64_t>());
}

}  // namespace tandem
