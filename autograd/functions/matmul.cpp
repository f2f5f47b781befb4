// Products of matrices.
#include <tandem/autograd/functions/helpers.h>

namespace tandem {
namespace {

using autograd::empty_beside;
using autograd::Gradients;
using autograd::needs_grad;
using autograd::record;
using autograd::Saved;

// A matrix that the kernels take: one of its strides is 1.
Tensor with_unit_stride(const Tensor& x) {
  const Shape& s = x.strides();
  const int r = x.dim() - 2, c = x.dim() - 1;
  const bool rows = s[c] == 1 && (x.shape()[r] == 1 || s[r] >= x.shape()[c]);
  const bool columns = s[r] == 1 && (x.shape()[c] == 1 || s[c] >= x.shape()[r]);
  return rows || columns ? x : x.contiguous();
}

void matmul_into(const Tensor& a, const Tensor& b, Tensor& c) {
  const Backend& table = backend(c.device());
  kernel("matmul", table, table.matmul)(with_unit_stride(a).raw(), with_unit_stride(b).raw(), c.raw_for_write());
}

// {m, k} x {k, n}
Tensor matmul_2d(const Tensor& a, const Tensor& b) {
  Tensor c = empty_beside(a, {a.size(0), b.size(1)}, a.dtype());
  matmul_into(a, b, c);
  if (needs_grad(a, b))
    record("matmul", {&a, &b}, c,
           [sa = Saved(b.requires_grad() ? a : Tensor()), sb = Saved(a.requires_grad() ? b : Tensor())](Gradients& g) {
             for (const std::size_t i : {std::size_t{0}, std::size_t{1}}) {
               if (!g.wanted(i)) continue;
               Tensor d = g.memory_for(i);
               if (i == 0)
                 matmul_into(g[0], sb.get("matmul").t(), d);
               else
                 matmul_into(sa.get("matmul").t(), g[0], d);
               g.set(i, std::move(d));
             }
           });
  return c;
}

// The batch dimensions of both, broadcast, with the matrix dimensions of x behind.
Tensor expand_batch(const Tensor& x, const Shape& batch) {
  Shape shape = batch;
  shape.push_back(x.size(-2));
  shape.push_back(x.size(-1));
  return x.expand(shape).reshape({batch.numel(), x.size(-2), x.size(-1)});
}

Tensor matmul_batched(const Tensor& a, const Tensor& b) {
  Shape batch_a = a.shape(), batch_b = b.shape();
  for (int i = 0; i < 2; ++i) {
    batch_a.erase(batch_a.dim() - 1);
    batch_b.erase(batch_b.dim() - 1);
  }
  const Shape batch = broadcast_shapes("matmul", batch_a, batch_b);
  Shape shape = batch;
  shape.push_back(a.size(-2));
  shape.push_back(b.size(-1));
  if (batch.numel() == 0 || shape.numel() == 0) return sum(a, -1, true) * sum(b, -2, true);  // no elements, right shape
  const Tensor xa = expand_batch(a, batch), xb = expand_batch(b, batch);
  Tensor c = empty_beside(a, {xa.size(0), a.size(-2), b.size(-1)}, a.dtype());
  {
    const NoGradGuard no_grad;
    for (int64_t i = 0; i < c.size(0); ++i) {
      Tensor part = c[i];
      matmul_into(xa[i], xb[i], part);
    }
  }
  if (needs_grad(xa, xb))
    record("matmul", {&xa, &xb}, c, [sa = Saved(xa), sb = Saved(xb)](Gradients& g) {
      if (g.wanted(0)) g.set(0, matmul_batched(g[0], sb.get("matmul").transpose(1, 2)));
      if (g.wanted(1)) g.set(1, matmul_batched(sa.get("matmul").transpose(1, 2), g[0]));
    });
  return c.view(shape);
}

// The way back through x w^T + bias and ReLU. Where the input is the result of another such operation and goes nowhere
// else, one product may take the gradient through that one's ReLU and sum it for that one's bias.
class LinearNode final : public autograd::Node {
 public:
  LinearNode(Saved x, Saved w, Saved y, Tensor mask)
      : Node("linear"), x_(std::move(x)), w_(std::move(w)), y_(std::move(y)), mask_(std::move(mask)) {}

  void release() override { x_ = w_ = y_ = Saved(), mask_ = Tensor(); }

  void backward(Gradients& g) override {
    const Backend& table = backend(g[0].device());
    const autograd::ThroughActivation* const through = through_relu(g[0]);
    const bool done = through != nullptr;
    const bool relu = y_.defined() && !done, weights = g.wanted(1), offsets = g.wanted(2);
    const bool both = weights && offsets && !relu && !done;
    const Tensor gradient = g[0].contiguous(), dz = relu ? empty_like(gradient) : gradient;
    Tensor dw = weights ? g.memory_for(1) : Tensor(), db;
    if (done)
      db = through->row_sum;
    else
      db = offsets ? g.memory_for(2) : relu ? empty_beside(dz, {dz.size(1)}, dz.dtype()) : Tensor();
    if (relu)
      table.bias_relu_grad(gradient.raw(), y_.get(name).raw(), Tensor(dz).raw_for_write(), db.raw_for_write());
    else if (both)
      table.linear_weight_grad(dz.raw(), x_.get(name).raw(), dw.raw_for_write(), db.raw_for_write());
    else if (offsets && !done)
      table.bias_relu_grad(dz.raw(), View(), View(), db.raw_for_write());
    if (weights && !both) matmul_into(dz.t(), x_.get(name), dw);
    if (weights) g.set(1, std::move(dw));
    if (offsets) g.set(2, std::move(db));
    if (g.wanted(0)) g.set(0, input_gradient(g, dz));
  }

 private:
  // What the operation after this one has left with the gradient, if it is as it was then.
  const autograd::ThroughActivation* through_relu(const Tensor& gradient) const {
    const autograd::Meta* const meta = autograd::meta_of(gradient);
    const autograd::ThroughActivation* const through = meta != nullptr ? meta->through.get() : nullptr;
    return through != nullptr && through->node == this && through->version == gradient.version() ? through : nullptr;
  }

  Tensor input_gradient(const Gradients& g, const Tensor& dz) {
    Tensor dx = g.memory_for(0);
    auto* const source = dynamic_cast<LinearNode*>(g.only_source(0));
    if (source == nullptr || !source->mask_.defined()) {
      matmul_into(dz, w_.get(name), dx);
      return dx;
    }
    Tensor row_sum = empty_beside(dx, {dx.size(1)}, dx.dtype());
    backend(dx.device())
        .linear_relu_input_grad(dz.raw(), w_.get(name).raw(), source->y_.get(name).raw(), source->mask_.raw(),
                                dx.raw_for_write(), row_sum.raw_for_write());
    autograd::ensure_meta(dx).through = std::make_unique<autograd::ThroughActivation>(
        autograd::ThroughActivation{source, dx.version(), std::move(row_sum)});
    return dx;
  }

  Saved x_, w_, y_;
  Tensor mask_;  // of y; undefined where there is none
};

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b) {
  common_device("matmul", {&a, &b});
  check(a.dim() > 0 && b.dim() > 0, "matmul", "needs vectors or matrices: a is {}, b is {}", a.shape(), b.shape());
  check(a.dtype() == b.dtype(), "matmul", "a is {}, b is {}; convert one with .to()", a.dtype(), b.dtype());
  autograd::check_real("matmul", a);
  const int64_t inner_a = a.size(-1), inner_b = b.size(b.dim() == 1 ? 0 : -2);
  check(inner_a == inner_b, "matmul", "the inner sizes differ, {} and {}: a is {}, b is {}", inner_a, inner_b,
        a.shape(), b.shape());
  if (a.dim() == 1 && b.dim() == 1) return matmul(a.unsqueeze(0), b.unsqueeze(1)).view({});
  if (a.dim() == 1) return matmul(a.unsqueeze(0), b).squeeze(-2);
  if (b.dim() == 1) return matmul(a, b.unsqueeze(1)).squeeze(-1);
  if (a.dim() == 2 && b.dim() == 2) return matmul_2d(a, b);
  return matmul_batched(a, b);
}

Tensor linear(const Tensor& x, const Tensor& w, const Tensor& bias, bool relu) {
  common_device("linear", {&x, &w, &bias});
  check(w.dim() == 2, "linear", "the weight must be {{out, in}}, but it is {}", w.shape());
  check(x.dim() >= 1 && x.size(-1) == w.size(1), "linear",
        "the last size of the input must be the weight's {}: input is {}, weight is {}", w.size(1), x.shape(),
        w.shape());
  check(x.dtype() == w.dtype(), "linear", "input is {}, weight is {}; convert one with .to()", x.dtype(), w.dtype());
  check(!bias.defined() || bias.dtype() == w.dtype(), "linear", "weight is {}, bias is {}; convert one with .to()",
        w.dtype(), bias.defined() ? bias.dtype() : w.dtype());
  if (bias.defined())
    check(bias.dim() == 1 && bias.size(0) == w.size(0), "linear", "the bias must be {{{}}}, but it is {}", w.size(0),
          bias.shape());
  autograd::check_real("linear", x);
  if (x.dim() != 2) {
    Shape shape = x.shape();
    shape.erase(shape.dim() - 1);
    const int64_t rows = shape.numel();
    shape.push_back(w.size(0));
    return linear(x.reshape({rows, x.size(-1)}), w, bias, relu).view(shape);
  }
  const Tensor rows = with_unit_stride(x), weight = with_unit_stride(w);
  const Tensor offset = bias.defined() ? bias.contiguous() : bias;
  Tensor y = empty_beside(x, {x.size(0), w.size(0)}, x.dtype()), mask;
  const Backend& table = backend(x.device());
  const View added = offset.defined() ? offset.raw() : View();
  const bool recorded = needs_grad(rows, weight, offset);
  if (relu && recorded && table.linear_relu_mask != nullptr) {
    mask = empty_beside(x, {x.size(0), mask_bytes(w.size(0))}, uint8);
    if (!table.linear_relu_mask(rows.raw(), weight.raw(), added, y.raw_for_write(), mask.raw_for_write())) mask = {};
  } else {
    kernel("linear", table, table.linear)(rows.raw(), weight.raw(), added, relu, y.raw_for_write());
  }
  if (!recorded) return y;
  const Tensor* const inputs[] = {&rows, &weight, &offset};
  Tensor* const outputs[] = {&y};
  autograd::connect(std::make_shared<LinearNode>(Saved(weight.requires_grad() ? rows : Tensor()),
                                                 Saved(rows.requires_grad() ? weight : Tensor()),
                                                 Saved(relu ? y : Tensor()), std::move(mask)),
                    inputs, outputs);
  return y;
}

}  // namespace tandem
