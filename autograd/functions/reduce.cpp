// Reductions.
#include <cmath>
#include <limits>

#include <tandem/autograd/functions/helpers.h>

namespace tandem {
namespace {

using autograd::empty_beside;
using autograd::Gradients;
using autograd::needs_grad;
using autograd::record;
using autograd::Saved;

struct Reduced {
  Shape kept;     // with size 1 where reduced
  Shape result;   // without those, unless keepdim
  int64_t count;  // elements that go into one result
};
Reduced reduced_shape(const char* op, const Tensor& x, const Dims& dims, bool keepdim) {
  const auto mask = dims.mask(op, x.dim());
  Reduced r{x.shape(), {}, 1};
  for (int i = 0; i < x.dim(); ++i) {
    const bool reduce = mask[static_cast<std::size_t>(i)];
    if (reduce) {
      r.count *= x.shape()[i];
      r.kept[i] = 1;
    }
    if (!reduce || keepdim) r.result.push_back(r.kept[i]);
  }
  return r;
}

Tensor reduce(const char* op, ReduceKind kind, const Tensor& x, const Shape& kept) {
  Tensor y = empty_beside(x, kept, x.dtype());
  const Backend& table = backend(x.device());
  kernel(op, table, table.reduce)(kind, x.raw(), y.raw_for_write());
  return y;
}

}  // namespace

Tensor sum(const Tensor& input, const Dims& dims, bool keepdim) {
  const Tensor x = is_floating(input.dtype()) ? input : input.to(int64);
  const Reduced r = reduced_shape("sum", x, dims, keepdim);
  Tensor y = reduce("sum", ReduceKind::sum, x, r.kept).view(r.result);
  if (needs_grad(x))
    record("sum", {&x}, y,
           [shape = x.shape(), kept = r.kept](Gradients& g) { g.set(0, g[0].view(kept).expand(shape)); });
  return y;
}

Tensor mean(const Tensor& x, const Dims& dims, bool keepdim) {
  autograd::check_real("mean", x);
  const Reduced r = reduced_shape("mean", x, dims, keepdim);
  return sum(x, dims, keepdim) / static_cast<double>(r.count);
}

Tensor var(const Tensor& x, const Dims& dims, int64_t correction, bool keepdim) {
  autograd::check_real("var", x);
  const Reduced r = reduced_shape("var", x, dims, keepdim);
  const Tensor distance = x - mean(x, dims, true);
  return sum(distance * distance, dims, keepdim) / static_cast<double>(std::max<int64_t>(0, r.count - correction));
}

Tensor norm(const Tensor& x, const Dims& dims, bool keepdim) {
  autograd::check_real("norm", x);
  const Reduced r = reduced_shape("norm", x, dims, keepdim);
  Tensor kept = reduce("norm", ReduceKind::sum_squares, x, r.kept);
  backend(x.device()).unary(UnaryOp::sqrt, kept.raw(), kept.raw_for_write());
  Tensor y = kept.view(r.result);
  if (needs_grad(x))
    record("norm", {&x}, y, [sx = Saved(x), sy = Saved(kept)](Gradients& g) {
      const Tensor& length = sy.get("norm");
      const Tensor inverse = where(length == 0, zeros_like(length), 1 / length);
      g.set(0, sx.get("norm") * (g[0].view(length.shape()) * inverse));
    });
  return y;
}

namespace {

Tensor extreme(const char* op, ReduceKind kind, const Tensor& x) {
  check(x.numel() > 0, op, "of no elements is not defined; the tensor is {}", x.shape());
  const Reduced r = reduced_shape(op, x, {}, false);
  Tensor y = reduce(op, kind, x, r.kept).view({});
  if (needs_grad(x))
    record(op, {&x}, y, [op, sx = Saved(x), sy = Saved(y)](Gradients& g) {
      const Tensor ties = (sx.get(op) == sy.get(op)).to(g[0].dtype());
      g.set(0, ties * (g[0] / sum(ties)));
    });
  return y;
}

ValuesIndices extreme(const char* op, bool largest, const Tensor& x, int64_t dim, bool keepdim) {
  const int d = wrap_dim(op, dim, x.dim());
  Shape kept = x.shape();
  if (x.dim() > 0) {
    check(kept[d] > 0, op, "of no elements is not defined: dimension {} of {} is empty", d, x.shape());
    kept[d] = 1;
  }
  ValuesIndices y{empty_beside(x, kept, x.dtype()), empty_beside(x, kept, int64)};
  const Backend& table = backend(x.device());
  kernel(op, table, table.arg_reduce)(largest, d, x.raw(), y.values.raw_for_write(), y.indices.raw_for_write());
  const Tensor kept_indices = y.indices;
  if (!keepdim && x.dim() > 0) {
    kept.erase(d);
    y = {y.values.view(kept), y.indices.view(kept)};
  }
  if (needs_grad(x))
    record(op, {&x}, y.values, [op, d, shape = x.shape(), index = Saved(kept_indices)](Gradients& g) {
      Tensor dx = zeros(shape, {.dtype = g[0].dtype(), .device = g[0].device()});
      const Tensor gradient = g[0].reshape(index.get(op).shape());
      backend(dx.device()).scatter_add(gradient.raw(), d, index.get(op).raw(), dx.raw_for_write());
      g.set(0, std::move(dx));
    });
  return y;
}

}  // namespace

Tensor max(const Tensor& x) { return extreme("max", ReduceKind::max, x); }
Tensor min(const Tensor& x) { return extreme("min", ReduceKind::min, x); }
ValuesIndices max(const Tensor& x, int64_t dim, bool keepdim) { return extreme("max", true, x, dim, keepdim); }
ValuesIndices min(const Tensor& x, int64_t dim, bool keepdim) { return extreme("min", false, x, dim, keepdim); }

Tensor argmax(const Tensor& x) {
  const NoGradGuard no_grad;
  return max(x.reshape({-1}), 0).indices;
}
Tensor argmax(const Tensor& x, int64_t dim, bool keepdim) {
  const NoGradGuard no_grad;
  return max(x, dim, keepdim).indices;
}

}  // namespace tandem
