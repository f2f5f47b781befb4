// The graph: a Node for each recorded operation, edges from it to the nodes its inputs came from, and a LeafNode for
// each leaf. Operations make nodes with `record`; the engine walks them.
#pragma once
#include <atomic>
#include <concepts>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <tandem/autograd/grad_mode.h>
#include <tandem/autograd/hooks.h>
#include <tandem/tensor/tensor.h>

namespace tandem::autograd {

class Node;
class LeafNode;

/// Where the gradient of an input goes: output number `output` of `node`; no node when it needs none.
struct Edge {
  std::shared_ptr<Node> node;
  std::uint32_t output = 0;
  std::uint32_t conversions = 0;  // of a leaf when the operation was recorded
};

/// What a gradient must look like.
struct TensorMeta {
  Shape shape;
  DType dtype = float32;
  Device device;
};

/// Whether the gradient of an input is asked for; `only`: it is the one contribution to where it goes.
enum class Demand : std::uint8_t { none, one_of_many, only };

/// What a backward reads and writes: the gradients of the operation's outputs, and of its inputs.
class Gradients {
 public:
  Gradients(const Node& node, std::vector<Tensor> outputs, std::span<const Demand> demands);
  /// Gradient of an output; zeros where nothing flowed back.
  const Tensor& operator[](std::size_t output);
  /// Whether anything flowed back to an output.
  bool arrived(std::size_t output) const { return outputs_[output].defined(); }
  /// Whether the gradient of an input is asked for.
  bool wanted(std::size_t input) const { return demands_[input] != Demand::none; }
  /// Uninitialised memory of the input's shape and type for its gradient. A leaf may offer its own (a gradient
  /// bucket), so that what is written here needs no copy.
  Tensor memory_for(std::size_t input) const;
  /// The operation that an input came from, when what set() gives goes there alone and no hook sees it; else null.
  Node* only_source(std::size_t input) const;
  /// Gives the gradient of an input.
  void set(std::size_t input, Tensor gradient) { inputs_[input] = std::move(gradient); }
  std::vector<Tensor>& inputs() { return inputs_; }

 private:
  const Node& node_;
  std::vector<Tensor> outputs_, inputs_;
  std::span<const Demand> demands_;
};

/// One recorded operation.
class Node {
 public:
  explicit Node(const char* name);
  virtual ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  /// Fills the gradients of the inputs from those of the outputs.
  virtual void backward(Gradients& gradients) = 0;
  /// Frees what was saved for backward.
  virtual void release() = 0;
  virtual LeafNode* as_leaf() { return nullptr; }
  TensorMeta meta(std::uint32_t output) const;

  const char* name;
  std::uint64_t sequence;  // later nodes are larger; a node's inputs are smaller than itself
  Device device;           // of the outputs; where backward runs
  const void* replica_owner;
  int replica, stream;  // of the thread that recorded it
  bool single_thread;   // the same: see SingleThreadScope
  bool released = false;
  std::vector<Edge> inputs;
  std::vector<TensorMeta> outputs;
  std::vector<HookList<GradientHook>> hooks;  // by output; empty until the first is added
};

/// The end of every path: adds what arrives to the leaf's gradient.
class LeafNode final : public Node {
 public:
  explicit LeafNode(std::weak_ptr<TensorImpl> owner);
  void backward(Gradients& gradients) override;
  void release() override {}
  LeafNode* as_leaf() override { return this; }
  TensorMeta leaf_meta() const;
  /// False once the leaf tensor is destroyed: its gradient would be seen by nobody.
  bool alive() const { return !owner_.expired(); }
  /// Whether the leaf has had another shape, type or device since it was at `conversions`.
  bool converted_since(std::uint32_t conversions) const;
  Tensor grad();
  void set_grad(Tensor gradient);
  /// The gradient, which is undefined from then on.
  Tensor take_grad();
  /// Memory that the gradient shall be written to whenever it is undefined; an undefined tensor withdraws it.
  void set_destination(const Tensor& destination);
  /// That memory, if no gradient lies in it. It is taken until every copy and view of the handle is gone, so that two
  /// backwards, or one and whoever kept an earlier gradient or a part of it, never share it.
  Tensor destination();
  /// Adds to the gradient, then calls the hooks. With `own` the leaf may keep the tensor itself.
  void accumulate(Tensor gradient, bool own);

  HookList<LeafHook> post_hooks;

 private:
  bool destination_free() const;
  void note(bool depends) const;  // for a graph that is being captured; the lock is held
  std::weak_ptr<TensorImpl> owner_;
  std::mutex mutex_;
  Tensor grad_, destination_;
};

/// What is known of a gradient on its way to `node`: it has gone through that operation's activation already.
struct ThroughActivation {
  const Node* node;
  std::uint32_t version;  // of the gradient: one that a hook has changed has to go through it again
  Tensor row_sum;
};

/// What a tensor's autograd slot holds.
struct Meta final : AutogradSlot {
  bool requires_grad = false;                         // of a leaf
  std::shared_ptr<LeafNode> leaf;                     // of a leaf that requires grad or did
  std::shared_ptr<Node> grad_fn;                      // of a recorded result
  std::uint32_t output = 0;                           // which output of grad_fn
  std::shared_ptr<Tensor> retained;                   // gradient kept by retain_grad
  std::shared_ptr<const StepHook> before_first_step;  // several parameters may share one, which is called once
  std::unique_ptr<ThroughActivation> through;         // of a gradient
};
/// The tensor's slot, or null.
Meta* meta_of(const Tensor& t);
/// The tensor's slot, made if missing.
Meta& ensure_meta(const Tensor& t);
/// The leaf node of a leaf that requires grad, or did before requires_grad_(false); Error for any other tensor.
LeafNode& leaf_of(std::string_view op, const Tensor& t);

/// A tensor kept for backward: its data without its history, and the version that the data must still have.
class Saved {
 public:
  Saved() = default;
  explicit Saved(const Tensor& t);
  /// The tensor; Error naming `op` if its contents were changed after it was saved.
  const Tensor& get(const char* op) const;
  bool defined() const { return tensor_.defined(); }

 private:
  Tensor tensor_;
  std::uint32_t version_ = 0;
};

/// Error naming `op` for a view whose base was changed by a recorded operation since the view was made.
void check_fresh(std::string_view op, const Tensor& t);

/// Whether an operation on these inputs must be recorded. Also true for a stale view, which then is an error there.
template <std::same_as<Tensor>... T>
bool needs_grad(const T&... inputs) {
  return grad_enabled() && ((inputs.defined() && (inputs.requires_grad() || inputs.impl()->stale())) || ...);
}
bool needs_grad(std::span<const Tensor> inputs);

/// Connects a new node to the inputs, and the outputs to it.
void connect(std::shared_ptr<Node> node, std::span<const Tensor* const> inputs, std::span<Tensor* const> outputs);

/// A node whose backward is a callable; freed with what it captured.
template <class Backward>
class LambdaNode final : public Node {
 public:
  LambdaNode(const char* node_name, Backward backward) : Node(node_name), backward_(std::move(backward)) {}
  void backward(Gradients& gradients) override { (*backward_)(gradients); }
  void release() override { backward_.reset(); }

 private:
  std::optional<Backward> backward_;
};

/// Records an operation: `backward(Gradients&)` sets the gradients of `inputs` from that of `output`. `name` must be a
/// string literal.
template <class Backward>
void record(const char* name, std::initializer_list<const Tensor*> inputs, Tensor& output, Backward backward) {
  Tensor* const outputs[] = {&output};
  connect(std::make_shared<LambdaNode<Backward>>(name, std::move(backward)), std::span(inputs.begin(), inputs.size()),
          outputs);
}
template <class Backward>
void record(const char* name, std::span<const Tensor> inputs, Tensor& output, Backward backward) {
  std::vector<const Tensor*> pointers;
  for (const Tensor& t : inputs) pointers.push_back(&t);
  Tensor* const outputs[] = {&output};
  connect(std::make_shared<LambdaNode<Backward>>(name, std::move(backward)), pointers, outputs);
}

}  // namespace tandem::autograd
