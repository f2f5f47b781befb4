// Views and copies: each forward is followed by its way back.
#include <algorithm>

#include <tandem/autograd/functions/helpers.h>
#include <tandem/tensor/capture.h>

namespace tandem {
namespace {

using autograd::Gradients;
using autograd::needs_grad;
using autograd::record;

// What reads a view reads this tensor.
void note_viewed(const std::shared_ptr<TensorImpl>& tensor) {
  if (t_capture_watch != nullptr) [[unlikely]]
    t_capture_watch->used(tensor, false);
}

// A view of x with another geometry. `back` turns the view's gradient into x's.
template <class Back>
Tensor view_of(const char* name, const Tensor& x, const Shape& shape, const Shape& strides, int64_t offset, Back back) {
  const auto& impl = x.impl();
  note_viewed(impl);
  Tensor y = make_view(impl->storage, impl->offset + offset, shape, strides, impl->dtype);
  TensorImpl& view = *y.impl();
  view.is_view = true;
  view.recorded_writes = impl->is_view && !impl->detached ? impl->recorded_writes : impl->storage->recorded_writes();
  view.unrecorded = impl->unrecorded || (!grad_enabled() && !x.is_leaf());
  if (needs_grad(x)) record(name, {&x}, y, [back](Gradients& g) { g.set(0, back(g[0])); });
  return y;
}

// Strides for seeing (shape, strides) as `to`, or nothing when elements would have to move.
std::optional<Shape> viewed_strides(const Shape& shape, const Shape& strides, const Shape& to) {
  Shape result = to;
  int d = shape.dim() - 1;
  int64_t chunk = 1, filled = 1, base = 1;  // chunk: elements of the dense run that ends at dimension d
  bool open = false;
  auto next_run = [&] {  // joins source dimensions that are dense with each other
    while (d >= 0 && shape[d] == 1) --d;
    if (d < 0) return false;
    base = strides[d];
    chunk = shape[d--];
    while (d >= 0 && (shape[d] == 1 || strides[d] == base * chunk)) chunk *= shape[d--];
    filled = 1;
    return open = true;
  };
  for (int i = to.dim() - 1; i >= 0; --i) {
    if (to[i] == 1) {
      result[i] = 1;
      continue;
    }
    if ((!open || filled == chunk) && !next_run()) return std::nullopt;
    if (chunk % (filled * to[i]) != 0) return std::nullopt;
    result[i] = base * filled;
    filled *= to[i];
  }
  return result;
}

// Fills in a size of -1.
Shape complete_shape(std::string_view op, const Shape& wanted, int64_t numel) {
  Shape shape = wanted;
  int unknown = -1;
  for (int i = 0; i < shape.dim(); ++i) {
    check(shape[i] >= -1, op, "size {} in {} is negative; only -1 is allowed, for one size to be found", shape[i],
          wanted);
    if (shape[i] != -1) continue;
    check(unknown < 0, op, "{} has more than one -1", wanted);
    unknown = i;
    shape[i] = 1;
  }
  const int64_t known = shape.numel();  // Error where that overflows
  if (unknown >= 0) {
    check(known > 0 && numel % known == 0, op, "{} elements cannot be arranged as {}", numel, wanted);
    shape[unknown] = numel / known;
  }
  check(shape.numel() == numel, op, "{} elements cannot be arranged as {}", numel, wanted);
  return shape;
}

std::optional<Tensor> try_view(const char* op, const Tensor& x, const Shape& shape) {
  std::optional<Shape> strides;
  if (x.is_contiguous() || x.numel() == 0)
    strides = contiguous_strides(shape);
  else
    strides = viewed_strides(x.shape(), x.strides(), shape);
  if (!strides) return std::nullopt;
  return view_of(op, x, shape, *strides, 0, [from = x.shape()](const Tensor& g) { return g.reshape(from); });
}

}  // namespace

Tensor Tensor::detach() const {
  const auto& from = impl();
  note_viewed(from);
  Tensor y = make_view(from->storage, from->offset, from->shape, from->strides, from->dtype);
  y.impl()->is_view = from->is_view;
  y.impl()->detached = true;
  return y;
}

Tensor Tensor::view(const Shape& wanted) const {
  const Shape shape = complete_shape("view", wanted, numel());
  if (auto y = try_view("view", *this, shape)) return *y;
  fail("view", "a tensor of shape {} with strides {} cannot be seen as {} without a copy; use reshape", this->shape(),
       strides(), shape);
}

Tensor Tensor::reshape(const Shape& wanted) const {
  const Shape shape = complete_shape("reshape", wanted, numel());
  if (auto y = try_view("reshape", *this, shape)) return *y;
  return contiguous().view(shape);
}

Tensor Tensor::flatten(int64_t start, int64_t end) const {
  const int first = wrap_dim("flatten", start, dim()), last = wrap_dim("flatten", end, dim());
  check(first <= last, "flatten", "start {} lies behind end {}", start, end);
  if (dim() == 0) return reshape({1});
  Shape shape;
  int64_t joined = 1;
  for (int i = 0; i < dim(); ++i) {
    if (i < first || i > last) {
      shape.push_back(this->shape()[i]);
      continue;
    }
    joined *= this->shape()[i];
    if (i == last) shape.push_back(joined);
  }
  return reshape(shape);
}

Tensor Tensor::transpose(int64_t a, int64_t b) const {
  const int i = wrap_dim("transpose", a, dim()), j = wrap_dim("transpose", b, dim());
  Shape shape = this->shape(), strides = this->strides();
  if (i != j) {
    std::swap(shape[i], shape[j]);
    std::swap(strides[i], strides[j]);
  }
  return view_of("transpose", *this, shape, strides, 0, [i, j](const Tensor& g) { return g.transpose(i, j); });
}

Tensor Tensor::t() const {
  check(dim() == 2, "t", "needs a matrix, but the tensor is {}; use transpose or permute", shape());
  return transpose(0, 1);
}

Tensor Tensor::permute(const Shape& order) const {
  check(order.dim() == dim(), "permute", "{} dimensions are ordered by {} numbers: {}", dim(), order.dim(), order);
  Shape shape = this->shape(), strides = this->strides(), inverse = order;
  std::array<bool, kMaxDims> used{};
  for (int i = 0; i < dim(); ++i) {
    const int from = wrap_dim("permute", order[i], dim());
    check(!std::exchange(used[static_cast<std::size_t>(from)], true), "permute", "dimension {} is listed twice in {}",
          from, order);
    shape[i] = this->shape()[from];
    strides[i] = this->strides()[from];
    inverse[from] = i;
  }
  return view_of("permute", *this, shape, strides, 0, [inverse](const Tensor& g) { return g.permute(inverse); });
}

Tensor Tensor::slice(int64_t dim, int64_t start, int64_t end, int64_t step) const {
  check(this->dim() > 0, "slice", "a single number cannot be sliced");
  const int d = wrap_dim("slice", dim, this->dim());
  check(step > 0, "slice", "step is {}; it must be positive", step);
  const int64_t size = shape()[d];
  auto bound = [size](int64_t i) { return std::clamp<int64_t>(i < 0 ? i + size : i, 0, size); };
  const int64_t from = bound(start), to = std::max(from, bound(end));
  Shape part = shape(), part_strides = strides();
  part[d] = (to - from) / step + ((to - from) % step != 0);
  if (part[d] > 1) part_strides[d] *= step;
  return view_of("slice", *this, part, part_strides, from * strides()[d],
                 [full = shape(), d, from, to, step](const Tensor& g) {
                   Tensor whole = zeros(full, {.dtype = g.dtype(), .device = g.device()});
                   whole.slice(d, from, to, step).copy_(g);
                   return whole;
                 });
}

Tensor Tensor::narrow(int64_t dim, int64_t start, int64_t length) const {
  check(this->dim() > 0, "narrow", "a single number cannot be narrowed");
  const int d = wrap_dim("narrow", dim, this->dim());
  const int64_t size = shape()[d], from = start < 0 ? start + size : start;
  check(from >= 0 && length >= 0 && from <= size && length <= size - from, "narrow",
        "{} elements from {} on are out of range: dimension {} of {} has {}", length, start, d, shape(), size);
  return slice(d, from, from + length);
}

Tensor Tensor::select(int64_t dim, int64_t index) const {
  check(this->dim() > 0, "select", "a single number has no dimension to select from");
  const int d = wrap_dim("select", dim, this->dim());
  const int64_t size = shape()[d], at = index < 0 ? index + size : index;
  check(size > 0, "select", "dimension {} of {} is empty, so there is no index {}", d, shape(), index);
  check(at >= 0 && at < size, "select", "index {} is out of range: dimension {} of {} has {} elements", index, d,
        shape(), size);
  Shape part = shape(), part_strides = strides();
  part.erase(d);
  part_strides.erase(d);
  return view_of("select", *this, part, part_strides, at * strides()[d], [full = shape(), d, at](const Tensor& g) {
    Tensor whole = zeros(full, {.dtype = g.dtype(), .device = g.device()});
    whole.select(d, at).copy_(g);
    return whole;
  });
}

Tensor Tensor::expand(const Shape& wanted) const {
  const int added = wanted.dim() - dim();
  check(added >= 0, "expand", "{} has fewer dimensions than the tensor, which is {}", wanted, shape());
  Shape to = wanted, to_strides = wanted;
  for (int i = 0; i < to.dim(); ++i) {
    const int64_t size = i < added ? 1 : shape()[i - added];
    if (to[i] == -1 && i >= added) to[i] = size;
    check(to[i] >= 0 && (size == to[i] || size == 1), "expand",
          "{} does not stretch to {}: only sizes of 1 can be repeated", shape(), wanted);
    to_strides[i] = size == to[i] && i >= added ? strides()[i - added] : 0;
  }
  return view_of("expand", *this, to, to_strides, 0,
                 [from = shape()](const Tensor& g) { return autograd::sum_to(g, from); });
}

Tensor Tensor::squeeze() const {
  Shape to, to_strides;
  for (int i = 0; i < dim(); ++i) {
    if (shape()[i] == 1) continue;
    to.push_back(shape()[i]);
    to_strides.push_back(strides()[i]);
  }
  return view_of("squeeze", *this, to, to_strides, 0, [from = shape()](const Tensor& g) { return g.reshape(from); });
}

Tensor Tensor::squeeze(int64_t dim) const {
  const int d = wrap_dim("squeeze", dim, this->dim());
  Shape to = shape(), to_strides = strides();
  if (this->dim() > 0 && to[d] == 1) {
    to.erase(d);
    to_strides.erase(d);
  }
  return view_of("squeeze", *this, to, to_strides, 0, [from = shape()](const Tensor& g) { return g.reshape(from); });
}

Tensor Tensor::unsqueeze(int64_t dim) const {
  const int d = wrap_dim("unsqueeze", dim, this->dim() + 1);
  Shape to = shape(), to_strides = strides();
  to.insert(d, 1);
  to_strides.insert(d, 1);
  return view_of("unsqueeze", *this, to, to_strides, 0, [from = shape()](const Tensor& g) { return g.reshape(from); });
}

std::vector<Tensor> Tensor::split(const std::vector<int64_t>& sizes, int64_t dim) const {
  int64_t start = 0;
  for (const int64_t size : sizes) {
    check(size >= 0, "split", "size {} is negative", size);
    start += size;
  }
  check(start == size(dim), "split", "the sizes sum to {}, but dimension {} of {} has {}", start, dim, shape(),
        size(dim));
  std::vector<Tensor> parts;
  start = 0;
  for (const int64_t size : sizes) {
    parts.push_back(narrow(dim, start, size));
    start += size;
  }
  return parts;
}

std::vector<Tensor> Tensor::split(int64_t size, int64_t dim) const {
  check(size > 0, "split", "the size of the parts is {}; it must be positive", size);
  std::vector<int64_t> sizes;
  for (int64_t rest = this->size(dim); rest > 0; rest -= size) sizes.push_back(std::min(rest, size));
  if (sizes.empty()) sizes.push_back(0);
  return split(sizes, dim);
}

std::vector<Tensor> Tensor::chunk(int64_t chunks, int64_t dim) const {
  check(chunks > 0, "chunk", "the number of chunks is {}; it must be positive", chunks);
  return split(std::max<int64_t>(1, (size(dim) + chunks - 1) / chunks), dim);
}

// Copies.

Tensor Tensor::clone() const {
  Tensor y = empty_like(*this);
  copy_values(raw(), y.raw_for_write());
  if (needs_grad(*this)) record("clone", {this}, y, [](Gradients& g) { g.set(0, g[0]); });
  return y;
}

Tensor Tensor::contiguous() const { return is_contiguous() ? *this : clone(); }

Tensor Tensor::to(DType wanted) const {
  if (dtype() == wanted) return *this;
  Tensor y = empty(shape(), {.dtype = wanted, .device = device()});
  copy_values(raw(), y.raw_for_write());
  if (is_floating(wanted) && needs_grad(*this))
    record("to", {this}, y, [from = dtype()](Gradients& g) { g.set(0, g[0].to(from)); });
  return y;
}

Tensor Tensor::to(Device wanted, bool non_blocking) const {
  if (device() == wanted) return *this;
  Tensor y = empty(shape(), {.dtype = dtype(), .device = wanted});
  copy_values(raw(), y.raw_for_write(), non_blocking);
  if (needs_grad(*this)) record("to", {this}, y, [from = device()](Gradients& g) { g.set(0, g[0].to(from)); });
  return y;
}

}  // namespace tandem
