// A C++ number as an operand or argument: remembers whether it was a real, an integer or a bool.
#pragma once
#include <concepts>
#include <cstdint>

#include <tandem/tensor/dtype.h>

namespace tandem {

/// A number given where a tensor could stand, as in `0.5 * x`. It does not raise the type of a tensor of its kind.
class Scalar {
 public:
  Scalar(double value) : real_(value), dtype_(float64) {}
  Scalar(float value) : Scalar(static_cast<double>(value)) {}
  Scalar(bool value) : real_(value), integer_(value), dtype_(boolean) {}
  template <std::integral T>
  Scalar(T value) : real_(static_cast<double>(value)), integer_(static_cast<std::int64_t>(value)), dtype_(int64) {}
  /// float64, int64 or bool.
  DType dtype() const { return dtype_; }
  double real() const { return real_; }
  /// The value as T; a real is truncated for an integer T.
  template <class T>
  T to() const {
    if constexpr (std::integral<T>) return dtype_ == float64 ? static_cast<T>(real_) : static_cast<T>(integer_);
    else return static_cast<T>(real_);
  }

 private:
  double real_ = 0;
  std::int64_t integer_ = 0;
  DType dtype_;
};

}  // namespace tandem
