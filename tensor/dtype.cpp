#include <tandem/tensor/dtype.h>

#include <algorithm>

namespace tandem {

std::string_view name(DType dtype) {
  static constexpr std::string_view kNames[kDTypeCount] = {"float32", "float64", "int64",    "int32",
                                                           "uint8",   "bool",    "bfloat16", "float16"};
  return kNames[static_cast<int>(dtype)];
}

DType promote(DType a, DType b) {
  if (a == b) return a;
  // Rank of each type in DType's order; the two 16-bit types are equal and meet in float32.
  static constexpr int kRank[kDTypeCount] = {5, 6, 3, 2, 1, 0, 4, 4};
  const int ra = kRank[static_cast<int>(a)], rb = kRank[static_cast<int>(b)];
  if (ra == rb) return float32;
  return ra > rb ? a : b;
}

}  // namespace tandem
