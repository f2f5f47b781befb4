// Binary operations, expanded from tensor/pointwise.h.
#include <tandem/tensor/cuda/kernels.h>
#include <tandem/tensor/cuda/launch.h>
#include <tandem/tensor/cuda/places.h>
#include <tandem/tensor/dispatch.h>

namespace tandem::cuda {
namespace {

template <class Op, class T>
struct Binary {
  Places<3> places;  // a, b, y
  TANDEM_DEVICE void operator()(std::int64_t i) const {
    char* at[3];
    places.at(i, at);
    value_at<T>(at[2]) = Op::value(value_at<T>(at[0]), value_at<T>(at[1]));
  }
};

template <class Op, class T, int Operand>
struct BinaryGrad {
  Places<4> places;  // g, a, b, d
  TANDEM_DEVICE void operator()(std::int64_t i) const {
    char* at[4];
    places.at(i, at);
    const T a = value_at<T>(at[1]), b = value_at<T>(at[2]);
    if constexpr (Operand == 0)
      value_at<T>(at[3]) = value_at<T>(at[0]) * Op::da(a, b);
    else
      value_at<T>(at[3]) = value_at<T>(at[0]) * Op::db(a, b);
  }
};

template <class Op>
void binary_typed(std::string_view name, const View& a, const View& b, const View& y) {
  const cudaStream_t stream = use(y.device);
  const auto body = [&]<class T>() { for_each_index(stream, y.numel(), Binary<Op, T>{places<3>({&a, &b, &y})}); };
  if constexpr (Op::takes == Takes::numbers)
    dispatch_number(name, y.dtype, body);
  else
    dispatch_real(name, y.dtype, body);
}

template <class Op>
void binary_grad_typed(std::string_view name, int operand, const View& g, const View& a, const View& b, const View& d) {
  const cudaStream_t stream = use(d.device);
  const Places<4> all = places<4>({&g, &a, &b, &d});
  dispatch_real(name, g.dtype, [&]<class T>() {
    if (operand == 0)
      for_each_index(stream, d.numel(), BinaryGrad<Op, T, 0>{all});
    else
      for_each_index(stream, d.numel(), BinaryGrad<Op, T, 1>{all});
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

}  // namespace tandem::cuda
