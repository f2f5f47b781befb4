// Unary, comparing and ternary operations, expanded from tensor/pointwise.h.
#include <tandem/tensor/cuda/kernels.h>
#include <tandem/tensor/cuda/launch.h>
#include <tandem/tensor/cuda/places.h>
#include <tandem/tensor/dispatch.h>

namespace tandem::cuda {
namespace {

template <class Op, class T>
struct Unary {
  Places<2> places;  // x, y
  TANDEM_DEVICE void operator()(std::int64_t i) const {
    char* at[2];
    places.at(i, at);
    value_at<T>(at[1]) = Op::value(value_at<T>(at[0]));
  }
};

// The derivative needs x or y, never both: one operand stands for whichever the operation uses.
template <class Op, class T>
struct UnaryGrad {
  Places<3> places;  // g, x or y, dx
  TANDEM_DEVICE void operator()(std::int64_t i) const {
    char* at[3];
    places.at(i, at);
    const T value = value_at<T>(at[1]);
    value_at<T>(at[2]) = value_at<T>(at[0]) * Op::derivative(value, value);
  }
};

template <class Op, class T>
struct Compare {
  Places<3> places;  // a, b, y
  TANDEM_DEVICE void operator()(std::int64_t i) const {
    char* at[3];
    places.at(i, at);
    value_at<bool>(at[2]) = Op::value(value_at<T>(at[0]), value_at<T>(at[1]));
  }
};

template <class Op, class T>
struct Ternary {
  Places<4> places;  // a, b, c, y
  TANDEM_DEVICE void operator()(std::int64_t i) const {
    char* at[4];
    places.at(i, at);
    value_at<T>(at[3]) = Op::value(value_at<T>(at[0]), value_at<T>(at[1]), value_at<T>(at[2]));
  }
};

template <class Op, class T>
struct TernaryGrad {
  Places<5> places;  // g, a, b, c, d
  int operand;
  TANDEM_DEVICE void operator()(std::int64_t i) const {
    char* at[5];
    places.at(i, at);
    value_at<T>(at[4]) =
        value_at<T>(at[0]) * Op::derivative(operand, value_at<T>(at[1]), value_at<T>(at[2]), value_at<T>(at[3]));
  }
};

template <class Op>
void unary_typed(std::string_view name, const View& x, const View& y) {
  const cudaStream_t stream = use(y.device);
  const auto body = [&]<class T>() { for_each_index(stream, y.numel(), Unary<Op, T>{places<2>({&x, &y})}); };
  if constexpr (Op::takes == Takes::numbers)
    dispatch_number(name, x.dtype, body);
  else
    dispatch_real(name, x.dtype, body);
}

template <class Op>
void unary_grad_typed(std::string_view name, const View& g, const View& v, const View& d) {
  const cudaStream_t stream = use(d.device);
  dispatch_real(name, g.dtype, [&]<class T>() {
    for_each_index(stream, d.numel(), UnaryGrad<Op, T>{places<3>({&g, &v, &d})});
  });
}

template <class Op>
void compare_typed(std::string_view name, const View& a, const View& b, const View& y) {
  const cudaStream_t stream = use(y.device);
  dispatch_value(name, a.dtype, [&]<class T>() {
    for_each_index(stream, y.numel(), Compare<Op, T>{places<3>({&a, &b, &y})});
  });
}

template <class Op>
void ternary_typed(std::string_view name, const View& a, const View& b, const View& c, const View& y) {
  const cudaStream_t stream = use(y.device);
  dispatch_number(name, y.dtype, [&]<class T>() {
    for_each_index(stream, y.numel(), Ternary<Op, T>{places<4>({&a, &b, &c, &y})});
  });
}

template <class Op>
void ternary_grad_typed(std::string_view name, int operand, const View& g, const View& a, const View& b, const View& c,
                        const View& d) {
  const cudaStream_t stream = use(d.device);
  dispatch_real(name, g.dtype, [&]<class T>() {
    for_each_index(stream, d.numel(), TernaryGrad<Op, T>{places<5>({&g, &a, &b, &c, &d}), operand});
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

}  // namespace tandem::cuda
