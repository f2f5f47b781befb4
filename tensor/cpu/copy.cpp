#include <cmath>
#include <cstring>

#include <tandem/tensor/cpu/dispatch.h>
#include <tandem/tensor/cpu/kernels.h>
#include <tandem/tensor/cpu/loops.h>

namespace tandem::cpu {
namespace {

template <class To, class From>
To convert(From value) {
  if constexpr (std::is_same_v<To, From>)
    return value;
  else if constexpr (std::is_same_v<From, BFloat16> || std::is_same_v<From, Float16>)
    return convert<To>(float(value));
  else if constexpr (std::is_same_v<To, BFloat16> || std::is_same_v<To, Float16>)
    return To(static_cast<float>(value));
  else if constexpr (std::is_same_v<To, bool>)
    return value != From(0);
  else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    // Out-of-range reals are undefined in C++; they saturate here, and NaN gives 0.
    if (!(value == value)) return To(0);
    if (value <= static_cast<From>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
    if (value >= static_cast<From>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
    return static_cast<To>(value);
  } else
    return static_cast<To>(value);
}

template <class From, class To>
TANDEM_CLONES void convert_dense(std::int64_t n, const From* from, To* to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = convert<To>(from[i]);
}

template <class From, class To>
void convert_all(const View& from, const View& to) {
  for_each_run<2>({&from, &to},
                  [](std::int64_t n, const std::array<char*, 2>& at, const std::array<std::int64_t, 2>& step) {
                    if (step[0] == sizeof(From) && step[1] == sizeof(To))
                      return convert_dense(n, reinterpret_cast<const From*>(at[0]), reinterpret_cast<To*>(at[1]));
                    for (std::int64_t i = 0; i < n; ++i)
                      element<To>(at[1], i, step[1]) = convert<To>(element<From>(at[0], i, step[0]));
                  });
}

}  // namespace

void copy(const View& from, const View& to) {
  if (from.dtype != to.dtype) {
    dispatch_any("copy", from.dtype, [&]<class From>() {
      dispatch_any("copy", to.dtype, [&]<class To>() { convert_all<From, To>(from, to); });
    });
    return;
  }
  dispatch_bits(from.dtype, [&]<class T>() {
    for_each_run<2>({&from, &to},
                    [](std::int64_t n, const std::array<char*, 2>& at, const std::array<std::int64_t, 2>& step) {
                      if (step[0] == sizeof(T) && step[1] == sizeof(T)) {
                        std::memmove(at[1], at[0], static_cast<std::size_t>(n) * sizeof(T));
                        return;
                      }
                      for (std::int64_t i = 0; i < n; ++i)
                        element<T>(at[1], i, step[1]) = element<T>(at[0], i, step[0]);
                    });
  });
}

void fill(const View& to, Scalar value) {
  dispatch_any("fill", to.dtype, [&]<class T>() {
    T v;
    if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>)
      v = T(value.to<float>());
    else
      v = value.dtype() == float64 ? convert<T>(value.real()) : convert<T>(value.to<std::int64_t>());
    for_each_run<1>({&to},
                    [v](std::int64_t n, const std::array<char*, 1>& at, const std::array<std::int64_t, 1>& step) {
                      if (step[0] == sizeof(T)) {
                        std::fill_n(reinterpret_cast<T*>(at[0]), n, v);
                        return;
                      }
                      for (std::int64_t i = 0; i < n; ++i) element<T>(at[0], i, step[0]) = v;
                    });
  });
}

}  // namespace tandem::cpu
