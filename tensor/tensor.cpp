#include <tandem/tensor/tensor.h>

#include <cmath>

#include <tandem/tensor/backend.h>
#include <tandem/tensor/capture.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/thread_context.h>

namespace tandem {
namespace {

bool is_dense(const Shape& shape, const Shape& strides) {
  if (shape.numel() == 0) return true;
  int64_t stride = 1;
  for (int i = shape.dim() - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[i] != stride) return false;
    stride *= shape[i];
  }
  return true;
}

// Throws Error unless every element lies in the storage.
void check_inside(const TensorImpl& t) {
  if (t.shape.numel() == 0) return;
  int64_t first = t.offset, last = t.offset;
  bool overflow = false;
  for (int i = 0; i < t.shape.dim(); ++i) {
    int64_t step = 0;
    overflow |= __builtin_mul_overflow(t.shape[i] - 1, t.strides[i], &step);
    int64_t& end = step < 0 ? first : last;
    overflow |= __builtin_add_overflow(end, step, &end);
  }
  const auto count = static_cast<int64_t>(t.storage->bytes() / size_of(t.dtype));
  check(!overflow && first >= 0 && last < count, "make_view",
        "shape {} with strides {} from element {} on reaches beyond its memory of {} elements", t.shape, t.strides,
        t.offset, count);
}

}  // namespace

ReplicaScope::ReplicaScope(const void* owner, int index)
    : previous_owner_(t_thread_context.replica_owner), previous_index_(t_thread_context.replica) {
  t_thread_context.replica_owner = owner;
  t_thread_context.replica = index;
}
ReplicaScope::~ReplicaScope() {
  t_thread_context.replica_owner = previous_owner_;
  t_thread_context.replica = previous_index_;
}
const void* ReplicaScope::owner() { return t_thread_context.replica_owner; }
int ReplicaScope::index() { return t_thread_context.replica; }

const std::shared_ptr<TensorImpl>& Tensor::impl() const {
  check(impl_ != nullptr, "Tensor", "an undefined tensor was used; assign a value to it first");
  // The one place where a parameter becomes the calling replica's.
  const ThreadContext& context = t_thread_context;
  if (context.replica_owner != nullptr && impl_->replicas && impl_->replicas->owner == context.replica_owner)
    return impl_->replicas->replicas[static_cast<std::size_t>(context.replica)];
  return impl_;
}

const Shape& Tensor::shape() const { return impl()->shape; }
int64_t Tensor::size(int64_t dim) const {
  check(this->dim() > 0, "size", "a tensor of a single number has no dimension {}", dim);
  return shape()[wrap_dim("size", dim, this->dim())];
}
int Tensor::dim() const { return shape().dim(); }
int64_t Tensor::numel() const { return shape().numel(); }
const Shape& Tensor::strides() const { return impl()->strides; }
DType Tensor::dtype() const { return impl()->dtype; }
Device Tensor::device() const { return impl()->storage->device(); }
int64_t Tensor::nbytes() const { return numel() * static_cast<int64_t>(size_of(dtype())); }
bool Tensor::is_contiguous() const { return impl()->contiguous; }
void Tensor::mark_changed() { impl()->storage->mark_changed(); }
std::uint32_t Tensor::version() const { return impl()->storage->version(); }

View Tensor::raw() const {
  const auto& shared = impl();
  const TensorImpl& t = *shared;
  if (t_capture_watch != nullptr) [[unlikely]]
    t_capture_watch->used(shared, false);
  View view;
  view.data = t.data();
  view.dtype = t.dtype;
  view.device = t.storage->device();
  view.dims = t.shape.dim();
  for (int i = 0; i < view.dims; ++i) {
    view.shape[i] = t.shape[i];
    view.strides[i] = t.strides[i];
  }
  return view;
}

View Tensor::raw_for_write() {
  const auto& shared = impl();
  const TensorImpl& t = *shared;
  if (!t.contiguous)
    for (int i = 0; i < t.shape.dim(); ++i)
      check(t.shape[i] <= 1 || t.strides[i] != 0, "write",
            "several elements of this expanded view {} share one place in memory; call clone() and write to that",
            t.shape);
  t.storage->mark_changed();
  if (t_capture_watch != nullptr) [[unlikely]]
    t_capture_watch->used(shared, true);
  return raw();
}

void* Tensor::checked_data(DType wanted, bool write) const {
  check(dtype() == wanted, "data", "the tensor is {}, but {} was asked for; convert it with .to({})", dtype(), wanted,
        wanted);
  check(device().is_cpu(), "data", "the tensor is on {}; the host cannot read it there: use .to(\"cpu\")", device());
  if (write) return Tensor(*this).raw_for_write().data;
  return impl()->data();
}

Tensor Tensor::to_host(DType wanted) const {
  const Device host;
  Tensor source = *this;
  if (!source.device().is_cpu()) source = source.detach().to(host);
  if (source.dtype() == wanted && source.is_contiguous()) return source;
  Tensor out = empty(shape(), {.dtype = wanted, .device = source.device()});
  copy_values(source.raw(), out.raw_for_write());
  return out;
}

Scalar Tensor::item_scalar() const {
  check(numel() == 1, "item", "the tensor has shape {}; item() needs exactly one element", shape());
  if (is_floating(dtype())) return *to_host(float64).const_data<double>();
  if (dtype() == boolean) return *to_host(boolean).const_data<bool>();
  return *to_host(int64).const_data<int64_t>();
}

void Tensor::set_data(const Tensor& source) {
  TensorImpl& t = *impl();
  const TensorImpl& s = *source.impl();
  if (t.shape != s.shape || t.dtype != s.dtype || t.storage->device() != s.storage->device()) ++t.conversions;
  t.storage = s.storage;
  t.offset = s.offset;
  t.shape = s.shape;
  t.strides = s.strides;
  t.dtype = s.dtype;
  t.contiguous = s.contiguous;
  t.recorded_writes = t.storage->recorded_writes();
  t.storage->mark_changed();
}

Tensor make_view(std::shared_ptr<Storage> storage, int64_t offset, const Shape& shape, const Shape& strides,
                 DType dtype) {
  auto impl = std::make_shared<TensorImpl>();
  impl->storage = std::move(storage);
  impl->offset = offset;
  impl->shape = shape;
  impl->strides = strides;
  impl->dtype = dtype;
  check_inside(*impl);
  impl->contiguous = is_dense(shape, strides);
  return Tensor(std::move(impl));
}

Device common_device(std::string_view op, std::initializer_list<const Tensor*> tensors) {
  const Tensor* first = nullptr;
  for (const Tensor* t : tensors) {
    if (!t->defined()) continue;
    if (first == nullptr) first = t;
    check(t->device() == first->device(), op, "tensors are on different devices: {} and {}; move one with .to(\"{}\")",
          first->device(), t->device(), first->device());
  }
  return first == nullptr ? Device() : first->device();
}

}  // namespace tandem
