// Joining, indexing, dropout, comparing.
#include <algorithm>
#include <cmath>

#include <tandem/autograd/functions/helpers.h>

namespace tandem {
namespace {

using autograd::empty_beside;
using autograd::Gradients;
using autograd::needs_grad;
using autograd::record;
using autograd::Saved;

void check_index(const char* op, RangeUser user, const Tensor& index, int64_t size) {
  check(index.dtype() == int64, op, "the index is {}; it must be int64", index.dtype());
  const Backend& table = backend(index.device());
  kernel(op, table, table.check_range)({user, size}, index.raw());
}

}  // namespace

Tensor cat(const std::vector<Tensor>& tensors, int64_t dim) {
  std::vector<Tensor> parts;
  for (const Tensor& t : tensors)
    if (t.shape() != Shape{0}) parts.push_back(t);
  check(!tensors.empty(), "cat", "there are no tensors to join");
  if (parts.empty()) return tensors.front().clone();
  const Tensor& first = parts.front();
  check(first.dim() > 0, "cat", "single numbers cannot be joined; use stack");
  const int d = wrap_dim("cat", dim, first.dim());
  Shape shape = first.shape();
  shape[d] = 0;
  DType dtype = first.dtype();
  std::vector<int64_t> sizes;
  for (const Tensor& t : parts) {
    common_device("cat", {&first, &t});
    bool fits = t.dim() == first.dim();
    for (int i = 0; fits && i < t.dim(); ++i) fits = i == d || t.shape()[i] == first.shape()[i];
    check(fits, "cat", "the shapes must be equal except in dimension {}: {} and {}", d, first.shape(), t.shape());
    sizes.push_back(t.shape()[d]);
    shape[d] += sizes.back();
    dtype = promote(dtype, t.dtype());
  }
  Tensor y = empty_beside(first, shape, dtype);
  {
    const NoGradGuard no_grad;
    const std::vector<Tensor> places = y.split(sizes, d);
    for (std::size_t i = 0; i < parts.size(); ++i) Tensor(places[i]).copy_(parts[i]);
  }
  for (Tensor& t : parts) t = t.to(dtype);
  if (needs_grad(parts))
    record("cat", parts, y, [sizes, d](Gradients& g) {
      const std::vector<Tensor> pieces = g[0].split(sizes, d);
      for (std::size_t i = 0; i < pieces.size(); ++i)
        if (g.wanted(i)) g.set(i, pieces[i]);
    });
  return y;
}

Tensor stack(const std::vector<Tensor>& tensors, int64_t dim) {
  check(!tensors.empty(), "stack", "there are no tensors to join");
  std::vector<Tensor> parts;
  for (const Tensor& t : tensors) {
    common_device("stack", {&tensors.front(), &t});
    check(t.shape() == tensors.front().shape(), "stack", "the shapes must be equal: {} and {}", tensors.front().shape(),
          t.shape());
    parts.push_back(t.unsqueeze(dim));
  }
  return cat(parts, dim);
}

Tensor index_select(const Tensor& x, int64_t dim, const Tensor& index) {
  common_device("index_select", {&x, &index});
  check(x.dim() > 0 && index.dim() == 1, "index_select", "needs a vector of indices: the tensor is {}, the index is {}",
        x.shape(), index.shape());
  const int d = wrap_dim("index_select", dim, x.dim());
  check_index("index_select", RangeUser::index_select, index, x.size(d));
  Shape shape = x.shape();
  shape[d] = index.size(0);
  Tensor y = empty_beside(x, shape, x.dtype());
  const Backend& table = backend(x.device());
  kernel("index_select", table, table.index_select)(x.raw(), d, index.raw(), y.raw_for_write());
  if (needs_grad(x))
    record("index_select", {&x}, y, [d, full = x.shape(), si = Saved(index)](Gradients& g) {
      Tensor dx = zeros(full, {.dtype = g[0].dtype(), .device = g[0].device()});
      backend(dx.device()).index_add(g[0].raw(), d, si.get("index_select").raw(), dx.raw_for_write());
      g.set(0, std::move(dx));
    });
  return y;
}

Tensor gather(const Tensor& x, int64_t dim, const Tensor& index) {
  common_device("gather", {&x, &index});
  const int d = wrap_dim("gather", dim, x.dim());
  check(index.dim() == x.dim(), "gather", "the index needs as many dimensions as the tensor: {} and {}", index.shape(),
        x.shape());
  for (int i = 0; i < x.dim(); ++i)
    check(i == d || index.shape()[i] <= x.shape()[i], "gather",
          "the index {} is larger than the tensor {} in dimension {}", index.shape(), x.shape(), i);
  check_index("gather", RangeUser::gather, index, x.dim() == 0 ? 1 : x.size(d));
  Tensor y = empty_beside(x, index.shape(), x.dtype());
  const Backend& table = backend(x.device());
  kernel("gather", table, table.gather)(x.raw(), d, index.raw(), y.raw_for_write());
  if (needs_grad(x))
    record("gather", {&x}, y, [d, full = x.shape(), si = Saved(index)](Gradients& g) {
      Tensor dx = zeros(full, {.dtype = g[0].dtype(), .device = g[0].device()});
      backend(dx.device()).scatter_add(g[0].raw(), d, si.get("gather").raw(), dx.raw_for_write());
      g.set(0, std::move(dx));
    });
  return y;
}

Tensor one_hot(const Tensor& labels, int64_t classes) {
  const NoGradGuard no_grad;
  check(classes > 0, "one_hot", "the number of classes is {}; it must be positive", classes);
  check_index("one_hot", RangeUser::one_hot, labels, classes);
  return (labels.unsqueeze(-1) == arange(classes, {.device = labels.device()})).to(int64);
}

Tensor dropout(const Tensor& x, double p, bool training) {
  check(p >= 0 && p <= 1, "dropout", "p is {}; it must lie in 0..1", p);
  if (!training || p == 0) return x;
  autograd::check_real("dropout", x);
  if (p == 1) return x * 0;
  Tensor mask = empty_like(x);
  const auto blocks = static_cast<std::uint64_t>(x.dtype() == float32 ? (x.numel() + 3) / 4 : (x.numel() + 1) / 2);
  const Backend& table = backend(x.device());
  kernel("dropout", table, table.random)(RandomKind::keep_mask, p, 0, draw(blocks), mask.raw_for_write());
  return x * mask;
}

bool equal(const Tensor& a, const Tensor& b) {
  common_device("equal", {&a, &b});
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) return false;
  const NoGradGuard no_grad;
  if (is_floating(a.dtype()) && !is_real(a.dtype())) return equal(a.to(float32), b.to(float32));
  return sum(a != b).item<int64_t>() == 0;
}

bool allclose(const Tensor& a, const Tensor& b, double rtol, double atol) {
  common_device("allclose", {&a, &b});
  if (a.shape() != b.shape()) return false;
  const std::vector<double> x = a.to_vector<double>(), y = b.to_vector<double>();
  return std::equal(x.begin(), x.end(), y.begin(), [&](double s, double t) {
    return s == t || std::abs(s - t) <= atol + rtol * std::abs(t);  // equal infinities are close
  });
}

}  // namespace tandem
