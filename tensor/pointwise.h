// The list of pointwise operations: value, derivative and test domain of each. CPU loops, CUDA kernels, public
// functions, backward and gradient checks are all expanded from it; a new operation is a new row.
#pragma once
#include <cmath>
#include <cstdint>

#include <tandem/tensor/compiler.h>

namespace tandem {

/// What a derivative is written with; only that is kept for backward.
enum class Uses { nothing, input, output };
/// Which types an operation takes: any number, or reals only (integers are converted to float32 first).
enum class Takes { numbers, reals };

// In the expressions T is the element type, x (or a, b, c) the inputs and y the value.

// X(name, takes, uses, value, dy/dx, domain low, domain high)
#define TANDEM_UNARY_OPS(X)                                                                                          \
  X(neg, numbers, nothing, T(-x), T(-1), -2, 2)                                                                      \
  X(abs, numbers, input, T(x > T(0) ? x : T(0) - x), T(T(x > T(0)) - T(x < T(0))), 0.2, 2)                           \
  X(relu, numbers, output, (x < T(0) ? T(0) : x), T(!(y <= T(0))), 0.2, 2)                                           \
  X(exp, reals, output, std::exp(x), y, -2, 2)                                                                       \
  X(log, reals, input, std::log(x), T(1) / x, 0.2, 3)                                                                \
  X(sqrt, reals, output, std::sqrt(x), T(0.5) / y, 0.2, 3)                                                           \
  X(sigmoid, reals, output, T(1) / (T(1) + std::exp(-x)), y * (T(1) - y), -3, 3)                                     \
  X(tanh, reals, output, std::tanh(x), T(1) - y * y, -2, 2)                                                          \
  X(gelu, reals, input, T(0.5) * x * (T(1) + std::erf(x * T(0.70710678118654752))),                                  \
    T(0.5) * (T(1) + std::erf(x * T(0.70710678118654752))) + x * std::exp(T(-0.5) * x * x) * T(0.39894228040143268), \
    -3, 3)

// X(name, takes, uses, value, dy/da, dy/db, domain of a: low, high, of b: low, high)
#define TANDEM_BINARY_OPS(X)                                                                                \
  X(add, numbers, nothing, T(a + b), T(1), T(1), -2, 2, -2, 2)                                              \
  X(sub, numbers, nothing, T(a - b), T(1), T(-1), -2, 2, -2, 2)                                             \
  X(mul, numbers, input, T(a* b), b, a, -2, 2, -2, 2)                                                       \
  X(div, reals, input, a / b, T(1) / b, -(a / b) / b, -2, 2, 0.5, 2)                                        \
  X(maximum, numbers, input, (a > b || a != a ? a : b),                                                     \
    (a > b    ? T(1)                                                                                        \
     : a == b ? T(0.5)                                                                                      \
              : T(0)),                                                                                      \
    (b > a    ? T(1)                                                                                        \
     : a == b ? T(0.5)                                                                                      \
              : T(0)),                                                                                      \
    -2, 2, -2, 2)                                                                                           \
  X(minimum, numbers, input, (a < b || a != a ? a : b),                                                     \
    (a < b    ? T(1)                                                                                        \
     : a == b ? T(0.5)                                                                                      \
              : T(0)),                                                                                      \
    (b < a    ? T(1)                                                                                        \
     : a == b ? T(0.5)                                                                                      \
              : T(0)),                                                                                      \
    -2, 2, -2, 2)                                                                                           \
  X(pow, numbers, input, pointwise::power(a, b), (b == T(0) ? T(0) : b * pointwise::power(a, T(b - T(1)))), \
    (a == T(0) && b >= T(0) ? T(0) : pointwise::power(a, b) * std::log(a)), 0.3, 2, -2, 2)

// X(name, value): the result is bool
#define TANDEM_COMPARE_OPS(X) \
  X(eq, a == b)               \
  X(ne, a != b)               \
  X(lt, a < b)                \
  X(le, a <= b)               \
  X(gt, a > b)                \
  X(ge, a >= b)

// X(name, value, dy/da, dy/db, dy/dc). `where` reads its condition as a number: a.
#define TANDEM_TERNARY_OPS(X)                                     \
  X(where, (a != T(0) ? b : c), T(0), T(a != T(0)), T(a == T(0))) \
  X(clamp, (a < b ? b : a > c ? c : a), T(a >= b && a <= c), T(a < b), T(a > c && a >= b))

namespace pointwise {

/// a to the power b; for integers by repeated multiplication (a negative exponent gives 0, but 1 and -1 as they are).
template <class T>
TANDEM_HD T power(T a, T b) {
  if constexpr (T(0.5) == T(0)) {
    if constexpr (T(-1) < T(0)) {
      if (b < T(0)) return a == T(1) ? T(1) : a == T(-1) ? (b % T(2) ? T(-1) : T(1)) : T(0);
    }
    // Unsigned, so that it wraps in any compiler; the other operations wrap because kernels are built with -fwrapv.
    std::uint64_t result = 1, factor = static_cast<std::uint64_t>(a);
    for (; b > T(0); b = T(b / T(2))) {
      if (b % T(2)) result *= factor;
      factor *= factor;
    }
    return static_cast<T>(result);
  } else {
    return b == T(2) ? a * a : std::pow(a, b);
  }
}

// One struct an operation, in the order of the list; UnaryOp::exp selects pointwise::unary::exp.
namespace unary {
#define X(op, takes_, uses_, value_, derivative_, low, high)                    \
  struct op {                                                                   \
    static constexpr Takes takes = Takes::takes_;                               \
    static constexpr Uses uses = Uses::uses_;                                   \
    template <class T>                                                          \
    TANDEM_HD static T value(T x) {                                             \
      return value_;                                                            \
    }                                                                           \
    template <class T>                                                          \
    TANDEM_HD static T derivative([[maybe_unused]] T x, [[maybe_unused]] T y) { \
      return derivative_;                                                       \
    }                                                                           \
  };
TANDEM_UNARY_OPS(X)
#undef X
}  // namespace unary

namespace binary {
#define X(op, takes_, uses_, value_, da_, db_, la, ha, lb, hb)          \
  struct op {                                                           \
    static constexpr Takes takes = Takes::takes_;                       \
    static constexpr Uses uses = Uses::uses_;                           \
    template <class T>                                                  \
    TANDEM_HD static T value(T a, T b) {                                \
      return value_;                                                    \
    }                                                                   \
    template <class T>                                                  \
    TANDEM_HD static T da([[maybe_unused]] T a, [[maybe_unused]] T b) { \
      return da_;                                                       \
    }                                                                   \
    template <class T>                                                  \
    TANDEM_HD static T db([[maybe_unused]] T a, [[maybe_unused]] T b) { \
      return db_;                                                       \
    }                                                                   \
  };
TANDEM_BINARY_OPS(X)
#undef X
}  // namespace binary

namespace compare {
#define X(op, value_)                       \
  struct op {                               \
    template <class T>                      \
    TANDEM_HD static bool value(T a, T b) { \
      return value_;                        \
    }                                       \
  };
TANDEM_COMPARE_OPS(X)
#undef X
}  // namespace compare

namespace ternary {
#define X(op, value_, da_, db_, dc_)                                                                               \
  struct op {                                                                                                      \
    template <class T>                                                                                             \
    TANDEM_HD static T value(T a, T b, T c) {                                                                      \
      return value_;                                                                                               \
    }                                                                                                              \
    template <class T>                                                                                             \
    TANDEM_HD static T derivative(int operand, [[maybe_unused]] T a, [[maybe_unused]] T b, [[maybe_unused]] T c) { \
      return operand == 0 ? da_ : operand == 1 ? db_ : dc_;                                                        \
    }                                                                                                              \
  };
TANDEM_TERNARY_OPS(X)
#undef X
}  // namespace ternary

}  // namespace pointwise

#define X(op, ...) op,
/// The operations of each of the four lists, by name.
enum class UnaryOp { TANDEM_UNARY_OPS(X) };
enum class BinaryOp { TANDEM_BINARY_OPS(X) };
enum class CompareOp { TANDEM_COMPARE_OPS(X) };
enum class TernaryOp { TANDEM_TERNARY_OPS(X) };
#undef X

}  // namespace tandem
