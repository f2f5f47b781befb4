// Element types, their names and sizes, and the promotion rules (PyTorch's).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <tandem/tensor/error.h>
#include <tandem/tensor/half.h>

namespace tandem {

/// The types of elements.
enum class DType : std::uint8_t { float32, float64, int64, int32, uint8, boolean, bfloat16, float16 };

inline constexpr DType float32 = DType::float32;
inline constexpr DType float64 = DType::float64;
inline constexpr DType int64 = DType::int64;
inline constexpr DType int32 = DType::int32;
inline constexpr DType uint8 = DType::uint8;
inline constexpr DType boolean = DType::boolean;
inline constexpr DType bfloat16 = DType::bfloat16;  // storage and conversion only
inline constexpr DType float16 = DType::float16;    // storage and conversion only
inline constexpr int kDTypeCount = 8;

/// "float32", ..., "bool", "bfloat16", "float16".
std::string_view name(DType dtype);
/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  constexpr std::size_t kSizes[kDTypeCount] = {4, 8, 8, 4, 1, 1, 2, 2};
  return kSizes[static_cast<int>(dtype)];
}
constexpr bool is_floating(DType d) { return d == float32 || d == float64 || d == bfloat16 || d == float16; }
/// float32 and float64: the types that arithmetic and gradients are defined on.
constexpr bool is_real(DType d) { return d == float32 || d == float64; }
constexpr bool is_integral(DType d) { return d == int64 || d == int32 || d == uint8; }

/// The type that holds values of both: bool < uint8 < int32 < int64 < float16 < float32 < float64, and
/// bfloat16 with float16 gives float32.
DType promote(DType a, DType b);

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = float32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = float64;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = int64;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = int32;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = uint8;
};
template <>
struct DTypeOf<bool> {
  static constexpr DType value = boolean;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = bfloat16;
};
template <>
struct DTypeOf<Float16> {
  static constexpr DType value = float16;
};
/// The DType of a C++ element type.
template <class T>
inline constexpr DType dtype_of = DTypeOf<T>::value;

}  // namespace tandem

template <>
struct fmt::formatter<tandem::DType> {
  template <class Context>
  constexpr auto parse(Context& context) {
    return context.begin();
  }
  template <class Context>
  auto format(tandem::DType dtype, Context& context) const {
    auto out = context.out();
    for (const char c : tandem::name(dtype)) *out++ = c;
    return out;
  }
};
