// Binary operations, expanded from tensor/pointwise.h.
#include <tandem/tensor/cpu/kernels.h>
#include <tandem/tensor/cpu/loops.h>
#include <tandem/tensor/dispatch.h>

namespace tandem::cpu {
namespace {

// StepA and StepB are 1 for a dense operand and 0 for one value that is repeated.
template <class Op, class T, int StepA, int StepB>
TANDEM_CLONES void binary_dense(std::int64_t n, const T* a, const T* b, T* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) y[i] = Op::value(a[i * StepA], b[i * StepB]);
}

template <class Op, class T>
void binary_run(std::int64_t n, const std::array<char*, 3>& at, const std::array<std::int64_t, 3>& step) {
  const auto* a = reinterpret_cast<const T*>(at[0]);
  const auto* b = reinterpret_cast<const T*>(at[1]);
  auto* y = reinterpret_cast<T*>(at[2]);
  constexpr std::int64_t kDense = sizeof(T);
  if (step[2] == kDense) {
    if (step[0] == kDense && step[1] == kDense) return binary_dense<Op, T, 1, 1>(n, a, b, y);
    if (step[0] == kDense && step[1] == 0) return binary_dense<Op, T, 1, 0>(n, a, b, y);
    if (step[0] == 0 && step[1] == kDense) return binary_dense<Op, T, 0, 1>(n, a, b, y);
  }
  for (std::int64_t i = 0; i < n; ++i)
    element<T>(at[2], i, step[2]) = Op::value(element<T>(at[0], i, step[0]), element<T>(at[1], i, step[1]));
}

template <class Op>
void binary_typed(std::string_view name, const View& a, const View& b, const View& y) {
  auto body = [&]<class T>() { for_each_run<3>({&a, &b, &y}, binary_run<Op, T>); };
  if constexpr (Op::takes == Takes::numbers)
    dispatch_number(name, y.dtype, body);
  else
    dispatch_real(name, y.dtype, body);
}

template <class Op, class T, int Operand>
T derivative(T a, T b) {
  if constexpr (Operand == 0)
    return Op::da(a, b);
  else
    return Op::db(a, b);
}

template <class Op, class T, int Operand, int StepA, int StepB>
TANDEM_CLONES void binary_grad_dense(std::int64_t n, const T* g, const T* a, const T* b, T* d) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) d[i] = g[i] * derivative<Op, T, Operand>(a[i * StepA], b[i * StepB]);
}

template <class Op, class T, int Operand>
void binary_grad_run(std::int64_t n, const std::array<char*, 4>& at, const std::array<std::int64_t, 4>& step) {
  const auto* g = reinterpret_cast<const T*>(at[0]);
  const auto* a = reinterpret_cast<const T*>(at[1]);
  const auto* b = reinterpret_cast<const T*>(at[2]);
  auto* d = reinterpret_cast<T*>(at[3]);
  constexpr std::int64_t kDense = sizeof(T);
  if (step[0] == kDense && step[3] == kDense) {
    if (step[1] == kDense && step[2] == kDense) return binary_grad_dense<Op, T, Operand, 1, 1>(n, g, a, b, d);
    if (step[1] == kDense && step[2] == 0) return binary_grad_dense<Op, T, Operand, 1, 0>(n, g, a, b, d);
    if (step[1] == 0 && step[2] == kDense) return binary_grad_dense<Op, T, Operand, 0, 1>(n, g, a, b, d);
  }
  for (std::int64_t i = 0; i < n; ++i)
    element<T>(at[3], i, step[3]) =
        element<T>(at[0], i, step[0]) *
        derivative<Op, T, Operand>(element<T>(at[1], i, step[1]), element<T>(at[2], i, step[2]));
}

template <class Op>
void binary_grad_typed(std::string_view name, int operand, const View& g, const View& a, const View& b, const View& d) {
  dispatch_real(name, g.dtype, [&]<class T>() {
    if (operand == 0)
      for_each_run<4>({&g, &a, &b, &d}, binary_grad_run<Op, T, 0>);
    else
      for_each_run<4>({&g, &a, &b, &d}, binary_grad_run<Op, T, 1>);
  });
}

}  // namespace

void binary(BinaryOp op, const View& a, const View& b, const View& y) {
  switch (op) {
#define X(name, ...)   \
  case BinaryOp::name: \
    return binary_typed<pointwise::binary::name>(#name, a, b, y);
    TANDEM_BINARY_OPS(X)
#undef X
  }
}

void binary_grad(BinaryOp op, int operand, const View& g, const View& a, const View& b, const View& d) {
  switch (op) {
#define X(name, ...)   \
  case BinaryOp::name: \
    return binary_grad_typed<pointwise::binary::name>(#name, operand, g, a, b, d);
    TANDEM_BINARY_OPS(X)
#undef X
  }
}

}  // namespace tandem::cpu
