// Tensor: a handle to shape, strides, type and storage, and to what backward needs. Copying a Tensor copies the handle.
// Members here change shape, type or place, or write in place; mathematics is free functions in autograd/functions.h.
#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <tandem/tensor/scalar.h>
#include <tandem/tensor/storage.h>
#include <tandem/tensor/view.h>

namespace tandem {

struct TensorImpl;

/// How a factory makes its tensor. `dtype` left out is taken from the values, else float32.
struct TensorOptions {
  std::optional<DType> dtype = {};
  Device device = {};
  bool requires_grad = false;
};

/// A handle to elements in memory, their shape and type, and their history for backward. Copies share them.
class Tensor {
 public:
  /// An undefined tensor; every use but defined() and assignment throws Error.
  Tensor() = default;
  explicit Tensor(std::shared_ptr<TensorImpl> impl) : impl_(std::move(impl)) {}

  bool defined() const { return impl_ != nullptr; }
  const Shape& shape() const;
  /// Size of a dimension; negative counts from the end.
  int64_t size(int64_t dim) const;
  int dim() const;
  int64_t numel() const;
  /// Bytes of the elements.
  int64_t nbytes() const;
  /// Elements between neighbours along each dimension.
  const Shape& strides() const;
  DType dtype() const;
  Device device() const;
  /// Whether the elements lie densely in row-major order.
  bool is_contiguous() const;

  /// Pointer to the first element, for writing: counts as a change. A pointer that is kept and written through later
  /// needs mark_changed(). Throws Error when T is not the dtype, or on a device the host cannot read.
  template <class T>
  T* data() {
    return static_cast<T*>(checked_data(dtype_of<T>, true));
  }
  /// Pointer to the first element, for reading.
  template <class T>
  const T* data() const {
    return static_cast<const T*>(checked_data(dtype_of<T>, false));
  }
  template <class T>
  const T* const_data() const {
    return data<T>();
  }
  /// Tells backward that the contents were changed through a kept pointer.
  void mark_changed();
  /// Number of changes so far; views share it.
  std::uint32_t version() const;
  /// The value of a tensor with one element, converted to T.
  template <class T>
  T item() const {
    return item_scalar().to<T>();
  }
  /// All elements in row-major order, converted to T.
  template <class T>
  std::vector<T> to_vector() const {
    const Tensor host = to_host(dtype_of<T>);
    const T* first = host.const_data<T>();
    return std::vector<T>(first, first + host.numel());  // braces would make a list of bools from two pointers
  }
  /// Values as PyTorch prints them; large tensors are shortened to three elements at each end of a dimension.
  std::string str() const;

  // Gradients (defined in autograd/).

  /// Whether operations on this tensor are recorded for backward.
  bool requires_grad() const;
  /// Turns recording on or off; only for leaves, and only float32 and float64.
  Tensor& requires_grad_(bool value = true);
  /// The accumulated gradient; undefined before the first backward and after zero_grad.
  Tensor grad() const;
  /// Replaces the gradient; an undefined tensor clears it. Must have this tensor's shape, dtype and device.
  void set_grad(const Tensor& gradient);
  /// True for tensors that were not computed by a recorded operation.
  bool is_leaf() const;
  /// Keeps the gradient of a tensor that is not a leaf, so that grad() has it after backward.
  void retain_grad();
  /// Adds d(this)/d(leaf) to every leaf's gradient. `gradient` is d(loss)/d(this); it may be left out for a tensor with
  /// one element. The graph is freed unless `retain_graph`.
  void backward(const Tensor& gradient = {}, bool retain_graph = false) const;
  /// The same values without history; shares storage.
  Tensor detach() const;

  // Views: share storage, differentiable (defined in autograd/).

  /// New shape without a copy; one size may be -1. Throws Error when the strides do not allow it: use reshape.
  Tensor view(const Shape& shape) const;
  /// New shape; copies only when a view is impossible.
  Tensor reshape(const Shape& shape) const;
  /// Dimensions start..end (inclusive) as one.
  Tensor flatten(int64_t start = 0, int64_t end = -1) const;
  Tensor transpose(int64_t a, int64_t b) const;
  /// Transpose of a matrix.
  Tensor t() const;
  /// Dimensions in a new order.
  Tensor permute(const Shape& order) const;
  /// Elements start .. start+length-1 of a dimension.
  Tensor narrow(int64_t dim, int64_t start, int64_t length) const;
  /// Every step-th element from start (inclusive) to end (exclusive); negative bounds count from the end.
  Tensor slice(int64_t dim, int64_t start, int64_t end, int64_t step = 1) const;
  /// One index of a dimension, which disappears.
  Tensor select(int64_t dim, int64_t index) const;
  /// select(0, index)
  Tensor operator[](int64_t index) const { return select(0, index); }
  /// Repeats sizes of 1 without a copy; -1 keeps a size. Writing through the result is an error.
  Tensor expand(const Shape& shape) const;
  /// Removes a dimension of size 1 (all of them without an argument).
  Tensor squeeze() const;
  Tensor squeeze(int64_t dim) const;
  Tensor unsqueeze(int64_t dim) const;
  /// At most `chunks` parts of ceil(size / chunks) along a dimension.
  std::vector<Tensor> chunk(int64_t chunks, int64_t dim = 0) const;
  /// Parts of `size` along a dimension; the last may be smaller.
  std::vector<Tensor> split(int64_t size, int64_t dim = 0) const;
  /// Parts of the given sizes, which sum to the dimension's.
  std::vector<Tensor> split(const std::vector<int64_t>& sizes, int64_t dim = 0) const;

  // Copies, differentiable (defined in autograd/).

  /// This tensor if it is dense, else a dense copy.
  Tensor contiguous() const;
  Tensor clone() const;
  /// On another device or in another type; the tensor itself when nothing changes. `non_blocking` from page-locked
  /// memory (cuda::pin_memory) to a CUDA device: the program goes on while values are copied, and must not change them
  /// before it has waited for the device.
  Tensor to(Device device, bool non_blocking = false) const;
  Tensor to(DType dtype) const;

  // In-place operations. The other operand is broadcast and converted; the result must fit this tensor's shape and
  // type. Recorded for backward unless this is a view or a leaf that requires grad, which is an error.

  Tensor& add_(const Tensor& other);
  Tensor& add_(Scalar other);
  Tensor& sub_(const Tensor& other);
  Tensor& sub_(Scalar other);
  Tensor& mul_(const Tensor& other);
  Tensor& mul_(Scalar other);
  Tensor& div_(const Tensor& other);
  Tensor& div_(Scalar other);
  Tensor& zero_();
  Tensor& fill_(Scalar value);
  /// Copies values in, across types and devices; `non_blocking` as in to().
  Tensor& copy_(const Tensor& source, bool non_blocking = false);
  Tensor& operator+=(const Tensor& other) { return add_(other); }
  Tensor& operator-=(const Tensor& other) { return sub_(other); }
  Tensor& operator*=(const Tensor& other) { return mul_(other); }
  Tensor& operator/=(const Tensor& other) { return div_(other); }
  Tensor& operator+=(Scalar other) { return add_(other); }
  Tensor& operator-=(Scalar other) { return sub_(other); }
  Tensor& operator*=(Scalar other) { return mul_(other); }
  Tensor& operator/=(Scalar other) { return div_(other); }

  // For the library and its extensions.

  /// The tensor's data as a kernel reads it.
  View raw() const;
  /// The same for writing: counts as a change; throws Error when elements overlap (an expanded view).
  View raw_for_write();
  /// The implementation that this handle stands for on the calling thread: inside a replica of a data-parallel model,
  /// a parameter is that replica's.
  const std::shared_ptr<TensorImpl>& impl() const;
  /// The implementation itself, whatever the thread: identifies a parameter.
  const std::shared_ptr<TensorImpl>& identity() const { return impl_; }
  /// Makes this handle and all its copies stand for other data: storage, shape, type and device; the gradient is kept.
  void set_data(const Tensor& source);

 private:
  void* checked_data(DType dtype, bool write) const;
  Scalar item_scalar() const;
  Tensor to_host(DType dtype) const;
  std::shared_ptr<TensorImpl> impl_;
};

/// What autograd keeps with a tensor; tensor/ only owns it.
struct AutogradSlot {
  virtual ~AutogradSlot() = default;
};

/// What stands for a parameter or buffer in each replica of a data-parallel model.
struct ReplicaSet {
  const void* owner = nullptr;  // the model whose replicas these are
  std::vector<std::shared_ptr<TensorImpl>> replicas;
  // CPU devices that share a parameter's memory, when several do. Work on all of it, such as an optimizer's step, is
  // divided as its gradients are summed: device i has the elements from cuts[i] up to cuts[i + 1].
  std::vector<Device> devices = {};
  std::vector<int64_t> cuts = {};
};

/// What a Tensor handle points to.
struct TensorImpl {
  std::shared_ptr<Storage> storage;
  int64_t offset = 0;  // of the first element, in elements
  Shape shape, strides;
  DType dtype = float32;
  bool contiguous = true;
  bool is_view = false;               // made by a view operation
  bool detached = false;              // by detach(): changes that are recorded for other handles do not concern it
  bool unrecorded = false;            // a view that was made without recording, of a tensor with history
  std::uint32_t recorded_writes = 0;  // of the storage when a view was made
  std::uint32_t conversions = 0;      // how often set_data changed shape, type or device
  std::unique_ptr<AutogradSlot> autograd;
  std::shared_ptr<const ReplicaSet> replicas;  // set on parameters and buffers of a data-parallel model

  void* data() const { return static_cast<char*>(storage->data()) + static_cast<std::size_t>(offset) * size_of(dtype); }
  /// Whether this is a view whose memory was changed by a recorded operation since: its history is not the memory's.
  bool stale() const { return is_view && !detached && recorded_writes != storage->recorded_writes(); }
};

/// Makes the calling thread stand for replica `index` of `owner` until it is destroyed; without an owner, for none.
class ReplicaScope {
 public:
  ReplicaScope(const void* owner, int index);
  ~ReplicaScope();
  ReplicaScope(const ReplicaScope&) = delete;
  ReplicaScope& operator=(const ReplicaScope&) = delete;
  /// The calling thread's owner and index.
  static const void* owner();
  static int index();

 private:
  const void* previous_owner_;
  int previous_index_;
};

/// A tensor over existing storage. Strides are checked against the storage's size.
Tensor make_view(std::shared_ptr<Storage> storage, int64_t offset, const Shape& shape, const Shape& strides,
                 DType dtype);
/// Throws Error naming both devices unless all defined tensors are on one.
Device common_device(std::string_view op, std::initializer_list<const Tensor*> tensors);

}  // namespace tandem

template <std::derived_from<tandem::Tensor> T>
struct fmt::formatter<T> : tandem::StrFormatter<T> {};
