#include <cstring>

#include <tandem/tensor/convert.h>
#include <tandem/tensor/count_value.h>
#include <tandem/tensor/cpu/kernels.h>
#include <tandem/tensor/cpu/loops.h>
#include <tandem/tensor/dispatch.h>

namespace tandem::cpu {
namespace {

template <class From, class To>
TANDEM_CLONES void convert_dense(std::int64_t n, const From* from, To* to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = convert_value<To>(from[i]);
}

template <class From, class To>
void convert_all(const View& from, const View& to) {
  for_each_run<2>({&from, &to},
                  [](std::int64_t n, const std::array<char*, 2>& at, const std::array<std::int64_t, 2>& step) {
                    if (step[0] == sizeof(From) && step[1] == sizeof(To))
                      return convert_dense(n, reinterpret_cast<const From*>(at[0]), reinterpret_cast<To*>(at[1]));
                    for (std::int64_t i = 0; i < n; ++i)
                      element<To>(at[1], i, step[1]) = convert_value<To>(element<From>(at[0], i, step[0]));
                  });
}

}  // namespace

void copy(const View& from, const View& to, bool /*non_blocking*/) {
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
    const T v = convert_scalar<T>(value);
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

void arange(Scalar start, Scalar step, const View& y) {
  const auto count = [&]<class T>(T first, T by) {
    for (std::int64_t i = 0; i < y.numel(); ++i) y.ptr<T>()[i] = count_value(first, by, i);
  };
  y.dtype == float64 ? count(start.real(), step.real()) : count(start.to<std::int64_t>(), step.to<std::int64_t>());
}

}  // namespace tandem::cpu
