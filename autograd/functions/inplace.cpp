// In-place operations. Without recording they write directly. With it, the result is computed as a new tensor, its
// values are written over the old ones, and the handle takes over the new history; the old values that backward needs
// were copied first.
#include <tandem/autograd/functions/helpers.h>

namespace tandem {
namespace {

using autograd::broadcast_view;
using autograd::check_fresh;
using autograd::kind;
using autograd::meta_of;
using autograd::needs_grad;

// Such a write would change what another tensor holds behind the back of that tensor's history.
void check_writable(const char* op, const Tensor& t) {
  check(!grad_enabled() || !t.impl()->unrecorded, op,
        "a view made under NoGradGuard of a tensor with history cannot be changed while recording; change it under "
        "NoGradGuard, or compute a new tensor");
}

void check_fits(const char* op, const Tensor& t, const Tensor& other) {
  check_writable(op, t);
  common_device(op, {&t, &other});
  check(broadcast_shapes(op, t.shape(), other.shape()) == t.shape(), op,
        "the other operand of shape {} does not fit into {}", other.shape(), t.shape());
}

// A view is as good as a base when nothing else holds its memory, as with the results of sum or of matmul on batches.
void check_recordable(const char* op, const Tensor& t) {
  check(!t.is_leaf() || !t.requires_grad(), op,
        "a leaf that requires grad cannot be changed in place while recording; do it under NoGradGuard");
  check_fresh(op, t);
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

// The old values are gone, and with them the history.
void overwrite_history(Tensor& t) {
  begin_recorded_write(t);
  autograd::ensure_meta(t).grad_fn.reset();
}

// `other` as it was before `t` is written, where they overlap without being the same elements in the same places.
Tensor apart(const Tensor& other, const Tensor& t) {
  if (other.impl()->storage != t.impl()->storage) return other;
  const bool same = other.raw().data == t.raw().data && other.shape() == t.shape() && other.strides() == t.strides();
  return same ? other : other.clone();
}

// `t` takes over the values and the history of `result`.
void adopt(Tensor& t, const Tensor& result) {
  const View to = t.raw_for_write();
  begin_recorded_write(t);
  copy_values(result.raw(), to);
  const autograd::Meta& from = *meta_of(result);
  autograd::Meta& meta = autograd::ensure_meta(t);
  meta.grad_fn = from.grad_fn;
  meta.output = from.output;
  meta.retained.reset();
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
  check(is_real(t.dtype()) || is_integral(t.dtype()), name,
        "there is no arithmetic on {}; convert with .to(float32), and back", t.dtype());
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
  check_writable("fill_", *this);
  const bool recorded = needs_grad(*this);
  if (recorded) check_recordable("fill_", *this);
  const View to = raw_for_write();
  if (recorded) overwrite_history(*this);
  backend(device()).fill(to, value);
  return *this;
}

Tensor& Tensor::zero_() { return fill_(0); }

Tensor& Tensor::copy_(const Tensor& source, bool non_blocking) {
  check_writable("copy_", *this);
  check(broadcast_shapes("copy_", shape(), source.shape()) == shape(), "copy_", "shape {} does not fit into {}",
        source.shape(), shape());
  const bool recorded = needs_grad(*this, source);
  if (recorded) {
    check_recordable("copy_", *this);
    check_fresh("copy_", source);
    if (source.requires_grad()) {
      adopt(*this, source.to(device()).to(dtype()).expand(shape()).clone());
      return *this;
    }
  }
  const Tensor from = apart(source.detach(), *this);
  const View to = raw_for_write();
  if (recorded) overwrite_history(*this);
  copy_values(broadcast_view(from, shape()), to, non_blocking);
  return *this;
}

}  // namespace tandem
