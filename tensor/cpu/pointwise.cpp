// Unary, comparing and ternary operations, expanded from tensor/pointwise.h.
#include <tandem/tensor/cpu/kernels.h>
#include <tandem/tensor/cpu/loops.h>
#include <tandem/tensor/dispatch.h>

namespace tandem::cpu {
namespace {

template <class Op, class T>
TANDEM_CLONES void unary_dense(std::int64_t n, const T* x, T* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) y[i] = Op::value(x[i]);
}

template <class Op, class T>
void unary_run(const View& x, const View& y) {
  for_each_run<2>({&x, &y},
                  [](std::int64_t n, const std::array<char*, 2>& at, const std::array<std::int64_t, 2>& step) {
                    if (step[0] == sizeof(T) && step[1] == sizeof(T))
                      return unary_dense<Op>(n, reinterpret_cast<const T*>(at[0]), reinterpret_cast<T*>(at[1]));
                    for (std::int64_t i = 0; i < n; ++i)
                      element<T>(at[1], i, step[1]) = Op::value(element<T>(at[0], i, step[0]));
                  });
}

template <class Op>
void unary_typed(std::string_view name, const View& x, const View& y) {
  auto body = [&]<class T>() { unary_run<Op, T>(x, y); };
  if constexpr (Op::takes == Takes::numbers)
    dispatch_number(name, x.dtype, body);
  else
    dispatch_real(name, x.dtype, body);
}

// The derivative needs x or y, never both: one operand stands for whichever the operation uses.
template <class Op, class T>
TANDEM_CLONES void unary_grad_dense(std::int64_t n, const T* g, const T* v, T* d) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) d[i] = g[i] * Op::derivative(v[i], v[i]);
}

template <class Op>
void unary_grad_typed(std::string_view name, const View& g, const View& v, const View& d) {
  dispatch_real(name, g.dtype, [&]<class T>() {
    for_each_run<3>({&g, &v, &d},
                    [](std::int64_t n, const std::array<char*, 3>& at, const std::array<std::int64_t, 3>& step) {
                      if (step[0] == sizeof(T) && step[1] == sizeof(T) && step[2] == sizeof(T))
                        return unary_grad_dense<Op>(n, reinterpret_cast<const T*>(at[0]),
                                                    reinterpret_cast<const T*>(at[1]), reinterpret_cast<T*>(at[2]));
                      for (std::int64_t i = 0; i < n; ++i) {
                        const T value = element<T>(at[1], i, step[1]);
                        element<T>(at[2], i, step[2]) = element<T>(at[0], i, step[0]) * Op::derivative(value, value);
                      }
                    });
  });
}

template <class Op>
void compare_typed(std::string_view name, const View& a, const View& b, const View& y) {
  dispatch_value(name, a.dtype, [&]<class T>() {
    for_each_run<3>(
        {&a, &b, &y}, [](std::int64_t n, const std::array<char*, 3>& at, const std::array<std::int64_t, 3>& step) {
          for (std::int64_t i = 0; i < n; ++i)
            element<bool>(at[2], i, step[2]) = Op::value(element<T>(at[0], i, step[0]), element<T>(at[1], i, step[1]));
        });
  });
}

template <class Op>
void ternary_typed(std::string_view name, const View& a, const View& b, const View& c, const View& y) {
  dispatch_number(name, y.dtype, [&]<class T>() {
    for_each_run<4>(
        {&a, &b, &c, &y}, [](std::int64_t n, const std::array<char*, 4>& at, const std::array<std::int64_t, 4>& step) {
          for (std::int64_t i = 0; i < n; ++i)
            element<T>(at[3], i, step[3]) =
                Op::value(element<T>(at[0], i, step[0]), element<T>(at[1], i, step[1]), element<T>(at[2], i, step[2]));
        });
  });
}

template <class Op>
void ternary_grad_typed(std::string_view name, int operand, const View& g, const View& a, const View& b, const View& c,
                        const View& d) {
  dispatch_real(name, g.dtype, [&]<class T>() {
    for_each_run<5>({&g, &a, &b, &c, &d}, [operand](std::int64_t n, const std::array<char*, 5>& at,
                                                    const std::array<std::int64_t, 5>& step) {
      for (std::int64_t i = 0; i < n; ++i)
        element<T>(at[4], i, step[4]) = element<T>(at[0], i, step[0]) *
                                        Op::derivative(operand, element<T>(at[1], i, step[1]),
                                                       element<T>(at[2], i, step[2]), element<T>(at[3], i, step[3]));
    });
  });
}

}  // namespace

void unary(UnaryOp op, const View& x, const View& y) {
  switch (op) {
#define X(name, ...)  \
  case UnaryOp::name: \
    return unary_typed<pointwise::unary::name>(#name, x, y);
    TANDEM_UNARY_OPS(X)
#undef X
  }
}

void unary_grad(UnaryOp op, const View& g, const View& x_or_y, const View& dx) {
  switch (op) {
#define X(name, ...)  \
  case UnaryOp::name: \
    return unary_grad_typed<pointwise::unary::name>(#name, g, x_or_y, dx);
    TANDEM_UNARY_OPS(X)
#undef X
  }
}

void compare(CompareOp op, const View& a, const View& b, const View& y) {
  switch (op) {
#define X(name, ...)    \
  case CompareOp::name: \
    return compare_typed<pointwise::compare::name>(#name, a, b, y);
    TANDEM_COMPARE_OPS(X)
#undef X
  }
}

void ternary(TernaryOp op, const View& a, const View& b, const View& c, const View& y) {
  switch (op) {
#define X(name, ...)    \
  case TernaryOp::name: \
    return ternary_typed<pointwise::ternary::name>(#name, a, b, c, y);
    TANDEM_TERNARY_OPS(X)
#undef X
  }
}

void ternary_grad(TernaryOp op, int operand, const View& g, const View& a, const View& b, const View& c,
                  const View& d) {
  switch (op) {
#define X(name, ...)    \
  case TernaryOp::name: \
    return ternary_grad_typed<pointwise::ternary::name>(#name, operand, g, a, b, c, d);
    TANDEM_TERNARY_OPS(X)
#undef X
  }
}

}  // namespace tandem::cpu
