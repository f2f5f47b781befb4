// In-place operations. Without recording they write directly. With it, the result is computed as a new tensor, its
// values are written over the old ones, and the handle takes over the new history; the old values that backward needs
// were copied first.
#include <tandem/autograd/functions/helpers.h>

namespace tandem {
namespace {

using autograd::broadcast_view;
using autograd::kind;
using autograd::meta_of;
using autograd::needs_grad;

void check_fits(const char* op, const Tensor& t, const Tensor& other) {
  common_device(op, {&t, &other});
  check(broadcast_shapes(op, t.shape(), other.shape()) == t.shape(), op,
        "the other operand of shape {} does not fit into {}", other.shape(), t.shape());
}

// A view is as good as a base when nothing else holds its memory, as with the results of sum or of matmul on batches.
void check_recordable(const char* op, const Tensor& t) {
  check(!t.is_leaf() || !t.requires_grad(), op,
        "a leaf that requires grad cannot be changed in place while recording; do it under NoGradGuard");
  const TensorImpl& impl = *t.impl();
  check(
      !impl.is_view || impl.storage.use_count() == 1, op,
      "an in-place change of a view cannot be recorded for backward; compute a new tensor instead, with cat, stack or "
      "where");
}
// Views that were made before are stale from here on.
void begin_recorded_write(Tensor& t) {
  t.impl()->is_view = false;
  t.impl()->storage->mark_recorded_write();
}

// `other` as it was before `t` is written, where they overlap without being the same elements in the same places.
Tensor apart(const Tensor& other, const Tensor& t) {
  if (other.impl()->storage != t.impl()->storage) return other;
  const bool same = other.raw().data == t.raw().data && other.shape() == t.shape() && other.strides() == t.strides();
  return same ? other : other.clone();
}

// `t` takes over the values and the history of `result`.
void adopt(Tensor& t, const Tensor& result) {
  begin_recorded_write(t);
  backend(t.device()).copy(result.raw(), t.raw_for_write());
  const autograd::Meta& from = *meta_of(result);
  autograd::Meta& to = autograd::ensure_meta(t);
  to.grad_fn = from.grad_fn;
  to.output = from.output;
  to.retained.reset();
}

template <class Function>
Tensor& in_place(const char* name, BinaryOp op, Tensor& t, const Tensor& other, Function function) {
  check_fits(name, t, other);
  const DType computed = op == BinaryOp::div && !is_floating(result_type(t, other)) ? float32 : result_type(t, other);
  check(kind(computed) <= kind(t.dtype()), name,
        "the result is {}, which does not fit into this {} tensor; convert with .to({}) first", computed, t.dtype(),
        computed);
  if (needs_grad(t, other)) {
    check_recordable(name, t);
    const Tensor old = t.clone();
    const bool shares_memory = other.impl()->storage == t.impl()->storage;
    adopt(t, function(old, shares_memory ? other.clone() : other).to(t.dtype()));
    return t;
  }
  const NoGradGuard no_grad;
  if (computed != t.dtype()) return t.copy_(function(t, other));
  const Tensor operand = apart(other, t).to(t.dtype());
  const View to = t.raw_for_write();
  backend(t.device()).binary(op, to, broadcast_view(operand, t.shape()), to);
  return t;
}

}  // namespace

#define TANDEM_IN_PLACE(op)                                                                                          \
  Tensor& Tensor::op##_(const Tensor& other) {                                                                       \
    return in_place(#op "_", BinaryOp::op, *this, other, [](const Tensor& a, const Tensor& b) { return op(a, b); }); \
  }                                                                                                                  \
  Tensor& Tensor::op##_(Scalar other) { return op##_(autograd::scalar_tensor(other, *this)); }
TANDEM_IN_PLACE(add)
TANDEM_IN_PLACE(sub)
TANDEM_IN_PLACE(mul)
TANDEM_IN_PLACE(div)
#undef TANDEM_IN_PLACE

Tensor& Tensor::fill_(Scalar value) {
  if (needs_grad(*this)) {
    check_recordable("fill_", *this);
    begin_recorded_write(*this);
    autograd::ensure_meta(*this).grad_fn.reset();  // the old values, and with them the history, are gone
  }
  backend(device()).fill(raw_for_write(), value);
  return *this;
}

Tensor& Tensor::zero_() { return fill_(0); }

Tensor& Tensor::copy_(const Tensor& source) {
  check(broadcast_shapes("copy_", shape(), source.shape()) == shape(), "copy_", "shape {} does not fit into {}",
        source.shape(), shape());
  if (needs_grad(*this, source)) {
    check_recordable("copy_", *this);
    if (source.requires_grad()) {
      adopt(*this, source.to(device()).to(dtype()).expand(shape()).clone());
      return *this;
    }
    begin_recorded_write(*this);
    autograd::ensure_meta(*this).grad_fn.reset();
  }
  Tensor from = apart(source.detach(), *this);
  if (from.device().type() != device().type()) from = from.to(device());
  backend(device()).copy(broadcast_view(from, shape()), raw_for_write());
  return *this;
}

}  // namespace tandem
