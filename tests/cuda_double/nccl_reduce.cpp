// Reductions over ranks. What it cannot catch: the rounding of a real NCCL, which adds in the order of its rings and
// trees.
#include "nccl_reduce.h"

#include <algorithm>
#include <cstdint>

namespace cuda_double {
namespace {

template <class T, class Wide>
struct Element {
  using Sum = Wide;
  static Wide read(const void* from, size_t i) { return static_cast<Wide>(static_cast<const T*>(from)[i]); }
  static void write(void* to, size_t i, Wide value) { static_cast<T*>(to)[i] = static_cast<T>(value); }
};

struct Half {
  using Sum = double;
  static double read(const void* from, size_t i) { return __half2float(static_cast<const __half*>(from)[i]); }
  static void write(void* to, size_t i, double value) { static_cast<__half*>(to)[i] = __double2half(value); }
};

struct Bfloat {
  using Sum = double;
  static double read(const void* from, size_t i) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[i]);
  }
  static void write(void* to, size_t i, double value) { static_cast<__nv_bfloat16*>(to)[i] = __double2bfloat16(value); }
};

template <class E>
void combine_as(ncclRedOp_t operation, const std::vector<const void*>& pieces, size_t count, void* out) {
  using Sum = typename E::Sum;
  for (size_t i = 0; i < count; ++i) {
    Sum value = E::read(pieces[0], i);
    for (size_t rank = 1; rank < pieces.size(); ++rank) {
      Sum next = E::read(pieces[rank], i);
      switch (operation) {
        case ncclMax:
          value = std::max(value, next);
          break;
        case ncclMin:
          value = std::min(value, next);
          break;
        case ncclProd:
          value = static_cast<Sum>(value * next);
          break;
        default:
          value = static_cast<Sum>(value + next);
      }
    }
    if (operation == ncclAvg) value = static_cast<Sum>(value / static_cast<Sum>(pieces.size()));
    E::write(out, i, value);
  }
}

}  // namespace

size_t width_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

void combine(ncclDataType_t type, ncclRedOp_t operation, const std::vector<const void*>& pieces, size_t count,
             void* out) {
  switch (type) {
    case ncclInt8:
      return combine_as<Element<int8_t, int64_t>>(operation, pieces, count, out);
    case ncclUint8:
      return combine_as<Element<uint8_t, uint64_t>>(operation, pieces, count, out);
    case ncclInt32:
      return combine_as<Element<int32_t, int64_t>>(operation, pieces, count, out);
    case ncclUint32:
      return combine_as<Element<uint32_t, uint64_t>>(operation, pieces, count, out);
    case ncclInt64:
      return combine_as<Element<int64_t, int64_t>>(operation, pieces, count, out);
    case ncclUint64:
      return combine_as<Element<uint64_t, uint64_t>>(operation, pieces, count, out);
    case ncclFloat16:
      return combine_as<Half>(operation, pieces, count, out);
    case ncclBfloat16:
      return combine_as<Bfloat>(operation, pieces, count, out);
    case ncclFloat32:
      return combine_as<Element<float, double>>(operation, pieces, count, out);
    default:
      return combine_as<Element<double, double>>(operation, pieces, count, out);
  }
}

}  // namespace cuda_double
