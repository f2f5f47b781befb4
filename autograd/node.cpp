#include <tandem/autograd/node.h>

#include <tandem/autograd/engine.h>
#include <tandem/tensor/backend.h>
#include <tandem/tensor/capture.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/random.h>
#include <tandem/tensor/thread_context.h>

namespace tandem {

bool grad_enabled() { return t_thread_context.record_gradients; }
GradModeGuard::GradModeGuard(bool enabled) : previous_(grad_enabled()) { t_thread_context.record_gradients = enabled; }
GradModeGuard::~GradModeGuard() { t_thread_context.record_gradients = previous_; }

namespace autograd {
namespace {
std::atomic<std::uint64_t> next_sequence{1};
}  // namespace

Node::Node(const char* node_name)
    : name(node_name),
      sequence(next_sequence.fetch_add(1, std::memory_order_relaxed)),
      replica_owner(ReplicaScope::owner()),
      replica(ReplicaScope::index()),
      stream(RandomStream::current()),
      single_thread(t_thread_context.single_thread) {}

// A chain of nodes is freed in a loop, not by recursion: a long one would overflow the stack.
Node::~Node() {
  thread_local std::vector<std::shared_ptr<Node>>* t_pending = nullptr;
  std::vector<std::shared_ptr<Node>> local;
  std::vector<std::shared_ptr<Node>>& pending = t_pending != nullptr ? *t_pending : local;
  for (Edge& edge : inputs)
    if (edge.node) pending.push_back(std::move(edge.node));
  if (t_pending != nullptr) return;
  t_pending = &local;
  while (!local.empty()) {
    const std::shared_ptr<Node> node = std::move(local.back());
    local.pop_back();
  }
  t_pending = nullptr;
}

TensorMeta Node::meta(std::uint32_t output) const {
  if (auto* leaf = const_cast<Node*>(this)->as_leaf()) return leaf->leaf_meta();
  return outputs[output];
}

LeafNode::LeafNode(std::weak_ptr<TensorImpl> owner) : Node("leaf"), owner_(std::move(owner)) {
  sequence = 0;
  outputs.push_back(leaf_meta());
}

TensorMeta LeafNode::leaf_meta() const {
  const auto owner = owner_.lock();
  if (!owner) return outputs.empty() ? TensorMeta() : outputs.front();
  return {owner->shape, owner->dtype, owner->storage->device()};
}

bool LeafNode::converted_since(std::uint32_t conversions) const {
  const auto owner = owner_.lock();
  return owner && owner->conversions != conversions;
}

void LeafNode::backward(Gradients& gradients) {
  if (!gradients.arrived(0)) return;
  const Tensor& g = gradients[0];
  bool in_destination = false;
  {
    std::lock_guard lock(mutex_);
    in_destination = destination_.defined() && destination_.identity() == g.identity();
  }
  // Nobody else can see it: `gradients` holds the handle, and so does this if it is the destination; the storage is the
  // tensor's alone.
  const long handles = in_destination ? 2 : 1;
  const bool own = g.is_contiguous() && g.impl()->storage.use_count() == 1 && g.impl().use_count() == handles;
  accumulate(g, own);
}

void LeafNode::accumulate(Tensor gradient, bool own) {
  const auto owner = owner_.lock();
  if (!owner) return;  // the leaf is gone, and its gradient with it
  {
    std::lock_guard lock(mutex_);
    note(true);
    if (grad_.defined()) {
      grad_.add_(gradient);
    } else if (destination_free()) {
      destination_.copy_(gradient);
      grad_ = destination_;
    } else {
      grad_ = own ? std::move(gradient) : gradient.clone();
    }
  }
  if (!post_hooks.empty())
    for (const auto& hook : post_hooks.snapshot()) (*hook)(Tensor(owner));
}

void LeafNode::note(bool depends) const {
  if (t_capture_watch == nullptr) return;
  if (const auto owner = owner_.lock()) t_capture_watch->gradient(owner, grad_, depends);
}
Tensor LeafNode::grad() {
  std::lock_guard lock(mutex_);
  note(true);
  return grad_;
}
void LeafNode::set_grad(Tensor gradient) {
  std::lock_guard lock(mutex_);
  note(false);
  grad_ = std::move(gradient);
}
Tensor LeafNode::take_grad() {
  std::lock_guard lock(mutex_);
  note(true);
  return std::exchange(grad_, {});
}
void LeafNode::set_destination(const Tensor& destination) {
  std::lock_guard lock(mutex_);
  destination_ = {};
  if (!destination.defined()) return;
  // A handle and a storage that only this leaf gives out: whoever holds a gradient or a view of one is counted there.
  const TensorImpl& memory = *destination.identity();
  destination_ = make_view(std::make_shared<Storage>(memory.storage, memory.storage->device()), memory.offset,
                           memory.shape, memory.strides, memory.dtype);
}
Tensor LeafNode::destination() {
  std::lock_guard lock(mutex_);
  return !grad_.defined() && destination_free() ? destination_ : Tensor();
}
bool LeafNode::destination_free() const {
  if (!destination_.defined()) return false;
  const auto& handle = destination_.identity();
  if (handle.use_count() > 1 || handle->storage.use_count() > 1) return false;
  const TensorMeta leaf = leaf_meta();  // may have been converted since
  if (handle->shape != leaf.shape || handle->dtype != leaf.dtype || handle->storage->device() != leaf.device)
    return false;
  // Whoever gave the last copy back may be another thread; locking a weak pointer waits for what it did before.
  return std::weak_ptr(handle).lock() && std::weak_ptr(handle->storage).lock();
}

Gradients::Gradients(const Node& node, std::vector<Tensor> outputs, std::span<const Demand> demands)
    : node_(node), outputs_(std::move(outputs)), inputs_(node.inputs.size()), demands_(demands) {}

const Tensor& Gradients::operator[](std::size_t output) {
  Tensor& g = outputs_[output];
  if (!g.defined()) {
    const TensorMeta& meta = node_.outputs[output];
    g = zeros(meta.shape, {.dtype = meta.dtype, .device = meta.device});
  }
  return g;
}

Tensor Gradients::memory_for(std::size_t input) const {
  const Edge& edge = node_.inputs[input];
  const TensorMeta meta = edge.node->meta(edge.output);
  if (LeafNode* leaf = edge.node->as_leaf(); leaf != nullptr && demands_[input] == Demand::only)
    if (Tensor destination = leaf->destination(); destination.defined()) return destination;
  return empty(meta.shape, {.dtype = meta.dtype, .device = meta.device});
}

Node* Gradients::only_source(std::size_t input) const {
  const Edge& edge = node_.inputs[input];
  if (demands_[input] != Demand::only) return nullptr;
  const auto& hooks = edge.node->hooks;
  return edge.output < hooks.size() && !hooks[edge.output].empty() ? nullptr : edge.node.get();
}

Meta* meta_of(const Tensor& t) { return static_cast<Meta*>(t.impl()->autograd.get()); }

Meta& ensure_meta(const Tensor& t) {
  auto& slot = t.impl()->autograd;
  if (!slot) slot = std::make_unique<Meta>();
  return static_cast<Meta&>(*slot);
}

LeafNode& leaf_of(std::string_view op, const Tensor& t) {
  Meta* meta = meta_of(t);
  check(meta != nullptr && meta->leaf && !meta->grad_fn, op,
        "needs a leaf that requires grad, or did until it was frozen; call requires_grad_() on a tensor that was not "
        "computed by a recorded operation");
  return *meta->leaf;
}

Saved::Saved(const Tensor& t) : tensor_(t.defined() ? t.detach() : Tensor()) {
  if (tensor_.defined()) version_ = tensor_.version();
}

const Tensor& Saved::get(const char* op) const {
  if (tensor_.defined())
    check(
        tensor_.version() == version_, op,
        "backward needs a tensor of shape {} that was changed in place after it was saved ({} changes since); use the "
        "out-of-place operation, or clone() before changing it{}",
        tensor_.shape(), tensor_.version() - version_,
        tensor_.device().is_cuda()
            ? "; if a cuda::Graph computed it, its replays are such changes: capture the backward in that graph"
            : "");
  return tensor_;
}

bool needs_grad(std::span<const Tensor> inputs) {
  if (!grad_enabled()) return false;
  for (const Tensor& t : inputs)
    if (needs_grad(t)) return true;
  return false;
}

void check_fresh(std::string_view op, const Tensor& t) {
  check(!t.impl()->stale(), op,
        "uses a view that was made before its base was changed in place; make the view again after the change");
}

void connect(std::shared_ptr<Node> node, std::span<const Tensor* const> inputs, std::span<Tensor* const> outputs) {
  node->inputs.reserve(inputs.size());
  for (const Tensor* t : inputs) {
    if (t->defined()) check_fresh(node->name, *t);
    Edge edge;
    if (t->defined() && t->requires_grad()) {
      const Meta& meta = *meta_of(*t);
      if (meta.grad_fn) {
        edge = {meta.grad_fn, meta.output};
      } else {
        edge = {meta.leaf, 0, t->impl()->conversions};
      }
    }
    node->inputs.push_back(std::move(edge));
  }
  node->device = outputs.front()->device();
  for (std::uint32_t i = 0; i < outputs.size(); ++i) {
    Tensor& t = *outputs[i];
    node->outputs.push_back({t.shape(), t.dtype(), t.device()});
    if (!is_floating(t.dtype())) continue;  // a Function may also return indices, which have no gradient
    Meta& meta = ensure_meta(t);
    meta.grad_fn = node;
    meta.output = i;
  }
}

}  // namespace autograd

bool Tensor::requires_grad() const {
  const auto* meta = autograd::meta_of(*this);
  return meta != nullptr && (meta->grad_fn != nullptr || meta->requires_grad);
}

bool Tensor::is_leaf() const {
  const auto* meta = autograd::meta_of(*this);
  return meta == nullptr || meta->grad_fn == nullptr;
}

Tensor& Tensor::requires_grad_(bool value) {
  check(!value || is_real(dtype()), "requires_grad_", "only float32 and float64 tensors have gradients; this one is {}",
        dtype());
  check(is_leaf(), "requires_grad_",
        "this tensor was computed by a recorded operation; call detach() for one without history");
  if (!value && autograd::meta_of(*this) == nullptr) return *this;
  auto& meta = autograd::ensure_meta(*this);
  meta.requires_grad = value;
  if (value && !meta.leaf) {
    meta.leaf = std::make_shared<autograd::LeafNode>(impl());
    if (t_capture_watch != nullptr) t_capture_watch->gradient(impl(), {}, false);  // this step's own: it has none yet
  }
  return *this;
}

Tensor Tensor::grad() const {
  const auto* meta = autograd::meta_of(*this);
  if (meta == nullptr) return {};
  if (meta->grad_fn) return meta->retained ? *meta->retained : Tensor();
  return meta->leaf ? meta->leaf->grad() : Tensor();
}

void Tensor::set_grad(const Tensor& gradient) {
  const autograd::Meta* meta = autograd::meta_of(*this);
  if (!gradient.defined() && is_leaf() && (meta == nullptr || !meta->leaf)) return;  // it has none
  autograd::LeafNode& leaf = autograd::leaf_of("set_grad", *this);
  if (gradient.defined())
    check(gradient.shape() == shape() && gradient.dtype() == dtype() && gradient.device() == device(), "set_grad",
          "the gradient is {} {} on {}, but the tensor is {} {} on {}", gradient.dtype(), gradient.shape(),
          gradient.device(), dtype(), shape(), device());
  leaf.set_grad(gradient);
}

void Tensor::retain_grad() {
  if (is_leaf()) return;
  auto& meta = autograd::ensure_meta(*this);
  if (meta.retained) return;
  meta.retained = std::make_shared<Tensor>();
  autograd::register_hook(*this, [slot = meta.retained](const Tensor& g) {
    *slot = slot->defined() ? Tensor(*slot).add_(g) : g.clone();
    return Tensor();
  }).release();
}

void Tensor::backward(const Tensor& gradient, bool retain_graph) const {
  autograd::backward(std::span(this, 1), std::span(&gradient, 1), retain_graph);
}

}  // namespace tandem
