#include <tandem/autograd/engine.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include <tandem/autograd/node.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/random.h>
#include <tandem/tensor/threads.h>
#include <tandem/tensor/trace.h>

namespace tandem::autograd {
namespace {

// One gradient on its way to a node. Contributions keep the order in which their edges were found, and are added in
// that order when the last has arrived: which thread came first never changes a bit.
struct Contribution {
  std::uint32_t output;
  Tensor gradient;
};

struct NodeState {
  int pending = 0;     // contributions that have not arrived
  bool seen = false;   // by discover
  bool needed = true;  // false: on no path to the inputs that were asked for
  std::vector<Contribution> contributions;
  std::vector<std::uint32_t> slots;  // for each of the node's edges: its place in the target's contributions
  std::vector<std::pair<std::uint32_t, Tensor*>> captures;  // outputs whose gradient `grad` returns
};

void check_gradient(const char* what, const char* name, const TensorMeta& meta, const Tensor& g) {
  check(g.shape() == meta.shape && g.dtype() == meta.dtype && g.device() == meta.device, name,
        "its {} gave a gradient of {} {} on {} for a tensor of {} {} on {}; they must be alike", what, g.dtype(),
        g.shape(), g.device(), meta.dtype, meta.shape, meta.device);
}

// Runs the hooks of a node's output, which may replace the gradient.
void run_hooks(const Node& node, std::size_t output, Tensor& gradient) {
  if (output >= node.hooks.size()) return;
  for (const auto& hook : node.hooks[output].snapshot())
    if (Tensor replaced = (*hook)(gradient); replaced.defined()) {
      check_gradient("hook", node.name, node.meta(static_cast<std::uint32_t>(output)), replaced);
      gradient = std::move(replaced);
    }
}

// Tensors added in place belong to this run alone.
Tensor sum_up(Tensor sum, const Tensor& more, bool& owned) {
  if (!sum.defined()) return more;
  if (!more.defined()) return sum;
  if (!is_real(sum.dtype())) {  // 16-bit types are only stored
    owned = true;
    return sum.to(float32).add_(more.to(float32)).to(sum.dtype());
  }
  if (!owned) {
    sum = sum.clone();
    owned = true;
  }
  return sum.add_(more);
}

class Run {
 public:
  explicit Run(bool retain_graph) : retain_graph_(retain_graph) {}

  void add_root(const Tensor& root, Tensor gradient) {
    Edge edge = source(root);
    NodeState& state = states_[edge.node.get()];
    ++state.pending;
    state.contributions.push_back({edge.output, std::move(gradient)});
    roots_.push_back(std::move(edge.node));
  }

  void discover() {
    std::vector<Node*> stack;
    for (const auto& root : roots_) visit(root.get(), stack);
    while (!stack.empty()) {
      Node* node = stack.back();
      stack.pop_back();
      order_.push_back(node);
      NodeState& state = states_[node];
      state.slots.resize(node->inputs.size());
      for (std::size_t i = 0; i < node->inputs.size(); ++i) {
        Node* target = node->inputs[i].node.get();
        if (target == nullptr) continue;
        if (const LeafNode* leaf = target->as_leaf())
          check(!leaf->converted_since(node->inputs[i].conversions), node->name,
                "backward leads to a leaf that was moved or converted after the forward; run the forward again");
        NodeState& target_state = states_[target];
        state.slots[i] = static_cast<std::uint32_t>(target_state.contributions.size());
        target_state.contributions.push_back({node->inputs[i].output, {}});
        ++target_state.pending;
        visit(target, stack);
      }
    }
  }

  // Keeps only the paths that lead to `inputs`, whose gradients go to `results`. Called between discover and run.
  void capture(const std::vector<Tensor>& inputs, std::vector<Tensor>& results) {
    for (auto& [node, state] : states_) state.needed = false;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Edge edge = source(inputs[i]);
      const auto found = states_.find(edge.node.get());
      if (found == states_.end()) continue;
      found->second.captures.emplace_back(edge.output, &results[i]);
      found->second.needed = true;
    }
    std::sort(order_.begin(), order_.end(), [](Node* a, Node* b) { return a->sequence < b->sequence; });
    for (Node* node : order_) {
      NodeState& state = states_[node];
      for (const Edge& edge : node->inputs)
        if (edge.node && states_[edge.node.get()].needed) state.needed = true;
    }
    restricted_ = true;
  }

  void run() {
    const trace::Span span("backward");
    const NoGradGuard no_grad;
    Run* const outer = std::exchange(t_current, this);
    struct Restore {
      Run* outer;
      ~Restore() { t_current = outer; }
    } const restore{outer};
    find_devices();
    for (const auto& root : roots_) {
      NodeState& state = states_[root.get()];
      if (--state.pending == 0) arrived(root.get());
    }
    if (devices_.size() == 1) {
      work(0);
    } else {
      run_on_devices(devices_, [this](int i) {
        Run* const previous = std::exchange(t_current, this);
        const Restore restore_worker{previous};
        try {
          work(i);
        } catch (...) {
          stop();
          throw;
        }
      });
    }
    for (std::size_t i = 0; i < callbacks_.size(); ++i) callbacks_[i]();  // a callback may queue another
  }

  static Run* current() { return t_current; }
  void queue_callback(UniqueFunction<void()> callback) {
    std::lock_guard lock(mutex_);
    callbacks_.push_back(std::move(callback));
  }
  bool first(const void* key) {
    std::lock_guard lock(mutex_);
    if (std::find(keys_.begin(), keys_.end(), key) != keys_.end()) return false;
    keys_.push_back(key);
    return true;
  }
  bool accumulates() const { return !restricted_; }
  bool reaches(Node& node) const { return states_.find(&node) != states_.end(); }

 private:
  static Edge source(const Tensor& t) {
    Meta* meta = meta_of(t);
    if (meta->grad_fn) return {meta->grad_fn, meta->output};
    return {meta->leaf, 0};
  }

  void visit(Node* node, std::vector<Node*>& stack) {
    if (std::exchange(states_[node].seen, true)) return;
    check(!node->released, "backward",
          "the graph of '{}' was freed by an earlier backward; give retain_graph = true to the backward that comes "
          "first, or run the forward again",
          node->name);
    stack.push_back(node);
  }

  // The first device is the root's: the calling thread works for it.
  void find_devices() {
    devices_.push_back(roots_.front()->as_leaf() ? roots_.front()->meta(0).device : roots_.front()->device);
    for (Node* node : order_)
      if (!node->as_leaf() && std::find(devices_.begin(), devices_.end(), node->device) == devices_.end())
        devices_.push_back(node->device);
    for (std::size_t i = 0; i < devices_.size(); ++i) queues_.push_back(std::make_unique<Queue>());
    unfinished_ = order_.size();
  }

  // All contributions of `node` are there. A leaf is finished at once, by whoever brought the last one: work that waits
  // for its gradient (an all-reduce) starts as early as it can.
  void arrived(Node* node) {
    if (node->as_leaf() != nullptr) return process(node);
    const auto at = std::find(devices_.begin(), devices_.end(), node->device) - devices_.begin();
    Queue& queue = *queues_[static_cast<std::size_t>(at)];
    std::lock_guard lock(queue.mutex);
    queue.ready.push_back(node);
    std::push_heap(queue.ready.begin(), queue.ready.end(), earlier);
    queue.changes.fetch_add(1, std::memory_order_release);
    queue.changes.notify_one();
  }

  static bool earlier(Node* a, Node* b) { return a->sequence < b->sequence; }

  void work(int device) {
    const NoGradGuard no_grad;
    const trace::DeviceSpan span("backward", devices_[static_cast<std::size_t>(device)]);
    Queue& queue = *queues_[static_cast<std::size_t>(device)];
    for (;;) {
      const std::uint32_t changes = queue.changes.load(std::memory_order_acquire);
      Node* node = nullptr;
      {
        std::lock_guard lock(queue.mutex);
        if (!queue.ready.empty()) {
          std::pop_heap(queue.ready.begin(), queue.ready.end(), earlier);
          node = queue.ready.back();
          queue.ready.pop_back();
        }
      }
      if (stopped_.load(std::memory_order_acquire)) return;
      if (node != nullptr)
        process(node);
      else if (unfinished_.load(std::memory_order_acquire) == 0)
        return;
      else
        wait_for_change(queue.changes, changes);
    }
  }

  // Wakes every worker, for the end or for an error.
  void wake_all() {
    for (const auto& queue : queues_) {
      queue->changes.fetch_add(1, std::memory_order_release);
      queue->changes.notify_all();
    }
  }
  void stop() {
    stopped_ = true;
    wake_all();
  }

  void process(Node* node) {
    NodeState& state = states_.find(node)->second;
    std::vector<Tensor> results;
    if (state.needed) {
      const ReplicaScope replica(node->replica_owner, node->replica);
      const RandomStream stream(node->stream);
      const SingleThreadScope one_thread(node->single_thread);
      results = run_node(*node, state);
    }
    state.contributions.clear();
    deliver(*node, state, results);
    if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) wake_all();
  }

  // The gradients of the node's outputs: the contributions' sums, as the hooks leave them.
  static std::vector<Tensor> collect(Node& node, NodeState& state) {
    std::vector<Tensor> outputs(std::max<std::size_t>(node.outputs.size(), 1));
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      bool owned = false;
      for (Contribution& c : state.contributions) {
        if (c.output != k || !c.gradient.defined()) continue;
        outputs[k] = outputs[k].defined() ? sum_up(std::move(outputs[k]), c.gradient, owned) : std::move(c.gradient);
      }
      if (outputs[k].defined()) run_hooks(node, k, outputs[k]);
    }
    return outputs;
  }

  // Runs the node's backward; returns the gradients of its inputs.
  std::vector<Tensor> run_node(Node& node, NodeState& state) {
    std::vector<Tensor> outputs = collect(node, state);
    for (auto& [output, result] : state.captures) *result = outputs[output];
    if (std::none_of(outputs.begin(), outputs.end(), [](const Tensor& g) { return g.defined(); })) return {};
    if (restricted_ && node.as_leaf()) return {};
    std::vector<Demand> demands(node.inputs.size());
    bool wanted = node.as_leaf() != nullptr;
    for (std::size_t i = 0; i < demands.size(); ++i) {
      Node* target = node.inputs[i].node.get();
      if (target == nullptr || (target->as_leaf() && !target->as_leaf()->alive())) continue;
      const NodeState& target_state = states_.find(target)->second;
      if (!target_state.needed) continue;
      demands[i] = target_state.contributions.size() == 1 && !restricted_ ? Demand::only : Demand::one_of_many;
      wanted = true;
    }
    if (!wanted) return {};
    Gradients gradients(node, std::move(outputs), demands);
    node.backward(gradients);
    if (!retain_graph_ && !node.as_leaf()) {
      node.released = true;
      node.release();
    }
    for (std::size_t i = 0; i < demands.size(); ++i) {
      Tensor& g = gradients.inputs()[i];
      if (!g.defined()) continue;
      if (demands[i] == Demand::none)
        g = Tensor();
      else
        check_gradient("backward", node.name, node.inputs[i].node->meta(node.inputs[i].output), g);
    }
    return std::move(gradients.inputs());
  }

  void deliver(Node& node, const NodeState& state, std::vector<Tensor>& gradients) {
    for (std::size_t i = 0; i < node.inputs.size(); ++i) {
      Node* target = node.inputs[i].node.get();
      if (target == nullptr) continue;
      bool last = false;
      {
        std::lock_guard lock(mutex_);
        NodeState& target_state = states_.find(target)->second;
        if (!gradients.empty()) target_state.contributions[state.slots[i]].gradient = std::move(gradients[i]);
        last = --target_state.pending == 0;
      }
      if (last) arrived(target);
    }
  }

  struct Queue {
    std::mutex mutex;
    std::vector<Node*> ready;  // a heap: the latest operation first
    std::atomic<std::uint32_t> changes{0};
  };

  static thread_local Run* t_current;
  const bool retain_graph_;
  bool restricted_ = false;  // only the inputs given to `grad`, and no leaf's gradient
  std::vector<std::shared_ptr<Node>> roots_;
  std::unordered_map<Node*, NodeState> states_;
  std::vector<Node*> order_;
  std::vector<Device> devices_;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::mutex mutex_;  // guards pending counts and contributions
  std::atomic<std::size_t> unfinished_{0};
  std::atomic<bool> stopped_{false};
  std::vector<UniqueFunction<void()>> callbacks_;
  std::vector<const void*> keys_;  // given to first_in_backward
};

thread_local Run* Run::t_current = nullptr;

Tensor root_gradient(const Tensor& root, const Tensor& gradient) {
  check(root.requires_grad(), "backward",
        "the tensor has no history: no operation on a leaf with requires_grad led to it; call requires_grad_() on the "
        "inputs, and compute outside of NoGradGuard");
  if (!gradient.defined()) {
    check(root.numel() == 1, "backward",
          "a gradient can be left out for one element only, but the tensor is {}; reduce it with sum() or mean(), or "
          "give the gradient",
          root.shape());
    return ones_like(root);
  }
  check(gradient.shape() == root.shape() && gradient.dtype() == root.dtype() && gradient.device() == root.device(),
        "backward", "the gradient is {} {} on {}, but the tensor is {} {} on {}", gradient.dtype(), gradient.shape(),
        gradient.device(), root.dtype(), root.shape(), root.device());
  return gradient;
}

void start(Run& run, std::span<const Tensor> roots, std::span<const Tensor> gradients) {
  check(!roots.empty(), "backward", "there are no tensors to start from");
  check(gradients.empty() || gradients.size() == roots.size(), "backward", "{} gradients were given for {} tensors",
        gradients.size(), roots.size());
  const NoGradGuard no_grad;
  for (std::size_t i = 0; i < roots.size(); ++i)
    run.add_root(roots[i], root_gradient(roots[i], gradients.empty() ? Tensor() : gradients[i]));
  run.discover();
}

Run& running(const char* op) {
  check(Run::current() != nullptr, op, "no backward is running on this thread; call it from a hook");
  return *Run::current();
}

}  // namespace

void backward(std::span<const Tensor> roots, std::span<const Tensor> gradients, bool retain_graph) {
  Run run(retain_graph);
  start(run, roots, gradients);
  run.run();
}

std::vector<Tensor> grad(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                         const GradOptions& options) {
  check(!options.create_graph, "grad",
        "create_graph is not supported: gradients of gradients are out of this library's scope");
  for (const Tensor& input : inputs)
    check(input.requires_grad(), "grad",
          "an input of shape {} does not require grad; call requires_grad_() on it first", input.shape());
  Run run(options.retain_graph);
  std::vector<Tensor> results(inputs.size());
  start(run, outputs, options.grad_outputs);
  run.capture(inputs, results);
  run.run();
  const NoGradGuard no_grad;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    check(results[i].defined() || options.allow_unused, "grad",
          "no output depends on input {} (shape {}); set allow_unused to get an undefined gradient for it", i,
          inputs[i].shape());
  // A gradient that passed several operations unchanged is one tensor for all of them; each caller's is its own.
  for (Tensor& g : results)
    if (g.defined() && (g.impl().use_count() > 1 || g.impl()->storage.use_count() > 1 || !g.is_contiguous()))
      g = g.clone();
  return results;
}

HookHandle register_hook(const Tensor& t, GradientHook hook) {
  check(t.requires_grad(), "register_hook", "the tensor does not require grad, so no gradient will ever arrive");
  Meta& meta = *meta_of(t);
  Node& node = meta.grad_fn ? *meta.grad_fn : *meta.leaf;
  const std::size_t output = meta.grad_fn ? meta.output : 0;
  if (node.hooks.size() <= output) node.hooks.resize(output + 1);
  return node.hooks[output].add(std::move(hook));
}

HookHandle register_post_accumulate_grad_hook(const Tensor& leaf, LeafHook hook) {
  return leaf_of("register_post_accumulate_grad_hook", leaf).post_hooks.add(std::move(hook));
}

void accumulate_grad(const Tensor& leaf, Tensor gradient) {
  const NoGradGuard no_grad;
  LeafNode& node = leaf_of("accumulate_grad", leaf);
  check(gradient.defined() && gradient.shape() == leaf.shape() && gradient.dtype() == leaf.dtype() &&
            gradient.device() == leaf.device(),
        "accumulate_grad", "the gradient does not fit the leaf, which is {} {} on {}", leaf.dtype(), leaf.shape(),
        leaf.device());
  const auto given = gradient.identity();
  const long handles = given.use_count(), views = given->storage.use_count();
  run_hooks(node, 0, gradient);
  // A hook may have kept it, or a view of it; what a hook gives may be kept by it too.
  const bool own = gradient.identity() == given && gradient.is_contiguous() && given.use_count() <= handles &&
                   given->storage.use_count() <= views;
  node.accumulate(std::move(gradient), own);
}

void queue_callback(UniqueFunction<void()> callback) { running("queue_callback").queue_callback(std::move(callback)); }
bool first_in_backward(const void* key) { return running("first_in_backward").first(key); }
bool accumulates_gradients() { return running("accumulates_gradients").accumulates(); }
bool reaches(const Tensor& leaf) { return running("reaches").reaches(leaf_of("reaches", leaf)); }

}  // namespace tandem::autograd
