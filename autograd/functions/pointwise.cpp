// Pointwise functions: everything here is expanded from the list in tensor/pointwise.h.
#include <tandem/autograd/functions/helpers.h>

namespace tandem {
namespace autograd {

View broadcast_view(const Tensor& t, const Shape& shape) {
  View from = t.raw(), to = from;
  const int added = shape.dim() - from.dims;
  to.dims = shape.dim();
  for (int i = 0; i < to.dims; ++i) {
    to.shape[i] = shape[i];
    to.strides[i] = i < added || from.shape[i - added] != shape[i] ? 0 : from.strides[i - added];
  }
  return to;
}

Tensor sum_to(const Tensor& gradient, const Shape& shape) {
  if (gradient.shape() == shape) return gradient;
  const int added = gradient.dim() - shape.dim();
  std::vector<int64_t> dims;
  for (int i = 0; i < gradient.dim(); ++i)
    if (i < added || shape[i - added] != gradient.shape()[i]) dims.push_back(i);
  return sum(gradient, dims, true).view(shape);
}

namespace {

DType operand_type(DType dtype, Takes takes, const char* op) {
  check(dtype != boolean, op, "is not defined on bool; convert with .to(float32) or .to(int64)");
  return takes == Takes::reals && is_integral(dtype) ? float32 : dtype;
}

template <class Op>
Tensor unary_function(UnaryOp op, const char* name, const Tensor& input) {
  const Tensor x = input.to(operand_type(input.dtype(), Op::takes, name));
  Tensor y = empty_beside(x, x.shape(), x.dtype());
  const Backend& table = backend(x.device());
  kernel(name, table, table.unary)(op, x.raw(), y.raw_for_write());
  if (needs_grad(x)) {
    const Saved saved(Op::uses == Uses::output ? y : Op::uses == Uses::input ? x : Tensor());
    record(name, {&x}, y, [op, name, saved](Gradients& g) {
      Tensor dx = g.memory_for(0);
      const View v = saved.defined() ? saved.get(name).raw() : g[0].raw();
      backend(dx.device()).unary_grad(op, g[0].raw(), v, dx.raw_for_write());
      g.set(0, std::move(dx));
    });
  }
  return y;
}

// The gradient of one operand: computed in the broadcast shape, summed back to the operand's.
template <class Op>
Tensor operand_gradient(BinaryOp op, const char* name, int operand, const Tensor& g, const Saved& a, const Saved& b,
                        const Shape& shape) {
  if (Op::uses == Uses::nothing && (operand == 0 ? Op::template da<float>(1, 1) : Op::template db<float>(1, 1)) == 1)
    return sum_to(g, shape);
  Tensor d = empty_beside(g, g.shape(), g.dtype());
  const View va = a.defined() ? broadcast_view(a.get(name), g.shape()) : g.raw();
  const View vb = b.defined() ? broadcast_view(b.get(name), g.shape()) : g.raw();
  backend(d.device()).binary_grad(op, operand, g.raw(), va, vb, d.raw_for_write());
  return sum_to(d, shape);
}

template <class Op>
Tensor binary_function(BinaryOp op, const char* name, const Tensor& left, const Tensor& right) {
  common_device(name, {&left, &right});
  const DType dtype = operand_type(result_type(left, right), Op::takes, name);
  const Tensor a = left.to(dtype), b = right.to(dtype);
  const Shape shape = broadcast_shapes(name, a.shape(), b.shape());
  Tensor y = empty_beside(a, shape, dtype);
  const Backend& table = backend(y.device());
  kernel(name, table, table.binary)(op, broadcast_view(a, shape), broadcast_view(b, shape), y.raw_for_write());
  if (needs_grad(a, b)) {
    const bool save = Op::uses == Uses::input;
    record(name, {&a, &b}, y,
           [op, name, sa = Saved(save ? a : Tensor()), sb = Saved(save ? b : Tensor()), shape_a = a.shape(),
            shape_b = b.shape()](Gradients& g) {
             if (g.wanted(0)) g.set(0, operand_gradient<Op>(op, name, 0, g[0], sa, sb, shape_a));
             if (g.wanted(1)) g.set(1, operand_gradient<Op>(op, name, 1, g[0], sa, sb, shape_b));
           });
  }
  return y;
}

Tensor compare_function(CompareOp op, const char* name, const Tensor& left, const Tensor& right) {
  common_device(name, {&left, &right});
  const NoGradGuard no_grad;
  const DType dtype = result_type(left, right);
  const Tensor a = left.to(dtype), b = right.to(dtype);
  const Shape shape = broadcast_shapes(name, a.shape(), b.shape());
  Tensor y = empty_beside(a, shape, boolean);
  const Backend& table = backend(y.device());
  kernel(name, table, table.compare)(op, broadcast_view(a, shape), broadcast_view(b, shape), y.raw_for_write());
  return y;
}

// a, b and c have one type here.
Tensor ternary_function(TernaryOp op, const char* name, const Tensor& a, const Tensor& b, const Tensor& c) {
  const Shape shape = broadcast_shapes(name, broadcast_shapes(name, a.shape(), b.shape()), c.shape());
  Tensor y = empty_beside(a, shape, b.dtype());
  const Backend& table = backend(y.device());
  kernel(name, table, table.ternary)(op, broadcast_view(a, shape), broadcast_view(b, shape), broadcast_view(c, shape),
                                     y.raw_for_write());
  if (needs_grad(a, b, c)) {
    record(name, {&a, &b, &c}, y, [op, name, sa = Saved(a), sb = Saved(b), sc = Saved(c)](Gradients& g) {
      const Shape& full = g[0].shape();
      const View va = broadcast_view(sa.get(name), full), vb = broadcast_view(sb.get(name), full),
                 vc = broadcast_view(sc.get(name), full);
      const Shape shapes[] = {sa.get(name).shape(), sb.get(name).shape(), sc.get(name).shape()};
      for (std::size_t i = 0; i < 3; ++i) {
        if (!g.wanted(i)) continue;
        Tensor d = empty_beside(g[0], full, g[0].dtype());
        backend(d.device()).ternary_grad(op, static_cast<int>(i), g[0].raw(), va, vb, vc, d.raw_for_write());
        g.set(i, sum_to(d, shapes[i]));
      }
    });
  }
  return y;
}

}  // namespace

Tensor scalar_tensor(Scalar value, const Tensor& other) {
  DType dtype = other.dtype();
  if (kind(value.dtype()) > kind(dtype)) dtype = value.dtype() == float64 ? float32 : int64;
  return full({}, value, {.dtype = dtype, .device = other.device()});
}

}  // namespace autograd

DType result_type(const Tensor& a, const Tensor& b) {
  const DType ta = a.dtype(), tb = b.dtype();
  if (ta == tb) return ta;
  const bool number_a = a.dim() == 0, number_b = b.dim() == 0;
  if (number_a == number_b) return promote(ta, tb);
  // A single number counts only when its kind is higher.
  const DType strong = number_a ? tb : ta, weak = number_a ? ta : tb;
  return autograd::kind(weak) > autograd::kind(strong) ? promote(strong, weak) : strong;
}

#define X(op, ...) \
  Tensor op(const Tensor& x) { return autograd::unary_function<pointwise::unary::op>(UnaryOp::op, #op, x); }
TANDEM_UNARY_OPS(X)
#undef X

#define X(op, ...)                                                                      \
  Tensor op(const Tensor& a, const Tensor& b) {                                         \
    return autograd::binary_function<pointwise::binary::op>(BinaryOp::op, #op, a, b);   \
  }                                                                                     \
  Tensor op(const Tensor& a, Scalar b) { return op(a, autograd::scalar_tensor(b, a)); } \
  Tensor op(Scalar a, const Tensor& b) { return op(autograd::scalar_tensor(a, b), b); }
TANDEM_BINARY_OPS(X)
#undef X

#define X(op, ...)                                                                                             \
  Tensor op(const Tensor& a, const Tensor& b) { return autograd::compare_function(CompareOp::op, #op, a, b); } \
  Tensor op(const Tensor& a, Scalar b) { return op(a, autograd::scalar_tensor(b, a)); }
TANDEM_COMPARE_OPS(X)
#undef X

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  common_device("where", {&condition, &a, &b});
  check(condition.dtype() == boolean, "where", "the condition is {}; it must be bool, as from a comparison",
        condition.dtype());
  const DType dtype = autograd::operand_type(result_type(a, b), Takes::numbers, "where");
  return autograd::ternary_function(TernaryOp::where, "where", condition.to(dtype), a.to(dtype), b.to(dtype));
}

Tensor clamp(const Tensor& x, Scalar low, Scalar high) {
  check(!(low.real() > high.real()), "clamp", "low is {}, high is {}; low must not be above high", low.real(),
        high.real());
  const Tensor lo = autograd::scalar_tensor(low, x), hi = autograd::scalar_tensor(high, x);
  const DType dtype = autograd::operand_type(promote(lo.dtype(), hi.dtype()), Takes::numbers, "clamp");
  return autograd::ternary_function(TernaryOp::clamp, "clamp", x.to(dtype), lo.to(dtype), hi.to(dtype));
}

}  // namespace tandem
