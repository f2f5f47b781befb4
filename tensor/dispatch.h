// From a run-time DType to a compile-time element type: calls body.template operator()<T>().
#pragma once
#include <string_view>

#include <tandem/tensor/dtype.h>

namespace tandem {

/// float32 and float64.
template <class Body>
void dispatch_real(std::string_view op, DType dtype, Body&& body) {
  if (dtype == float32) return body.template operator()<float>();
  if (dtype == float64) return body.template operator()<double>();
  fail(op, "is not defined on {}; convert with .to(float32) first", dtype);
}

/// The types with arithmetic: float32, float64, int64, int32, uint8.
template <class Body>
void dispatch_number(std::string_view op, DType dtype, Body&& body) {
  if (dtype == int64) return body.template operator()<std::int64_t>();
  if (dtype == int32) return body.template operator()<std::int32_t>();
  if (dtype == uint8) return body.template operator()<std::uint8_t>();
  dispatch_real(op, dtype, body);
}

/// Those and bool.
template <class Body>
void dispatch_value(std::string_view op, DType dtype, Body&& body) {
  if (dtype == boolean) return body.template operator()<bool>();
  dispatch_number(op, dtype, body);
}

/// Every type, for storage and conversion.
template <class Body>
void dispatch_any(std::string_view op, DType dtype, Body&& body) {
  if (dtype == bfloat16) return body.template operator()<BFloat16>();
  if (dtype == float16) return body.template operator()<Float16>();
  dispatch_value(op, dtype, body);
}

/// An unsigned integer of the element's size, for moving values unchanged.
template <class Body>
void dispatch_bits(DType dtype, Body&& body) {
  switch (size_of(dtype)) {
    case 1:
      return body.template operator()<std::uint8_t>();
    case 2:
      return body.template operator()<std::uint16_t>();
    case 4:
      return body.template operator()<std::uint32_t>();
    default:
      return body.template operator()<std::uint64_t>();
  }
}

}  // namespace tandem
