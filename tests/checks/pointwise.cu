// Compiles every operation of the pointwise list for the GPU, so that the list stays fit for it.
#include <tandem/tensor/pointwise.h>

namespace {

using namespace tandem;

template <class T>
__global__ void every_operation(const T* in, T* out, bool* flags) {
  const T a = in[0], b = in[1], c = in[2];
  int i = 0, f = 0;
#define X(op, ...)                           \
  out[i++] = pointwise::unary::op::value(a); \
  out[i++] = pointwise::unary::op::derivative(a, b);
  TANDEM_UNARY_OPS(X)
#undef X
#define X(op, ...)                               \
  out[i++] = pointwise::binary::op::value(a, b); \
  out[i++] = pointwise::binary::op::da(a, b);    \
  out[i++] = pointwise::binary::op::db(a, b);
  TANDEM_BINARY_OPS(X)
#undef X
#define X(op, ...) flags[f++] = pointwise::compare::op::value(a, b);
  TANDEM_COMPARE_OPS(X)
#undef X
#define X(op, ...)                                   \
  out[i++] = pointwise::ternary::op::value(a, b, c); \
  out[i++] = pointwise::ternary::op::derivative(2, a, b, c);
  TANDEM_TERNARY_OPS(X)
#undef X
}

template __global__ void every_operation<float>(const float*, float*, bool*);
template __global__ void every_operation<double>(const double*, double*, bool*);

}  // namespace
