// A C++ number as an operand or argument: remembers whether it was a real, an integer or a bool.
#pragma once
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>

#include <tandem/tensor/dtype.h>

namespace tandem {

/// A number given where a tensor could stand, as in `0.5 * x`. It does not raise the type of a tensor of its kind.
class Scalar {
 public:
  Scalar(double value) : real_(value), dtype_(float64) {}
  Scalar(float value) : Scalar(static_cast<double>(value)) {}
  Scalar(bool value) : real_(value), integer_(value), dtype_(boolean) {}
  /// Error for an unsigned number above int64's maximum.
  template <std::integral T>
  Scalar(T value) : real_(static_cast<double>(value)), integer_(static_cast<std::int64_t>(value)), dtype_(int64) {
    check((value < T(0)) == (integer_ < 0), "Scalar", "{} does not fit into int64; give it as a double",
          static_cast<std::uint64_t>(value));
  }
  /// float64, int64 or bool.
  DType dtype() const { return dtype_; }
  double real() const { return real_; }
  /// The value as T. A real becomes an integer as in Tensor::to: cut towards 0, saturated, and 0 for NaN.
  template <class T>
  T to() const {
    if constexpr (std::is_same_v<T, bool>)
      return dtype_ == float64 ? real_ != 0 : integer_ != 0;
    else if constexpr (std::integral<T>)
      return dtype_ == float64 ? saturate<T>() : static_cast<T>(integer_);
    else
      return static_cast<T>(real_);
  }

 private:
  template <class T>
  T saturate() const {
    using Limits = std::numeric_limits<T>;
    if (real_ != real_) return T(0);
    if (real_ <= static_cast<double>(Limits::min())) return Limits::min();
    if (real_ >= static_cast<double>(Limits::max())) return Limits::max();
    return static_cast<T>(real_);
  }

  double real_ = 0;
  std::int64_t integer_ = 0;
  DType dtype_;
};

}  // namespace tandem
