// The numbers of arange, the same on every kind of device.
#pragma once
#include <cstdint>
#include <type_traits>

#include <tandem/tensor/compiler.h>

namespace tandem {

/// start + i * step: of integers modulo 2^64, of doubles with the product rounded before it is added.
template <class T>
TANDEM_HD T count_value(T start, T step, std::int64_t i) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::uint64_t>(start) +
                          static_cast<std::uint64_t>(i) * static_cast<std::uint64_t>(step));
  } else {
#if defined(__CUDA_ARCH__)
    return __dadd_rn(start, __dmul_rn(static_cast<double>(i), step));  // never fused
#else
    return start + static_cast<double>(i) * step;
#endif
  }
}

}  // namespace tandem
