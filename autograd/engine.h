// The engine: walks the graph from the roots, latest operation first, and adds up gradients.
#pragma once
#include <span>
#include <vector>

#include <tandem/autograd/hooks.h>
#include <tandem/tensor/tensor.h>

namespace tandem::autograd {

/// Adds d(sum of root_i * gradient_i) / d(leaf) to the gradient of every leaf. An undefined gradient stands for 1 and
/// needs a root with one element. The graph is freed unless `retain_graph`.
void backward(std::span<const Tensor> roots, std::span<const Tensor> gradients = {}, bool retain_graph = false);

/// How `grad` behaves. `create_graph` (gradients of gradients) is not supported and throws Error.
struct GradOptions {
  std::vector<Tensor> grad_outputs = {};  // one an output; left out: 1
  bool retain_graph = false;
  bool create_graph = false;
  bool allow_unused = false;  // an input that no output depends on: undefined instead of Error
};
/// Gradients of the outputs with respect to the inputs, leaves or not; no leaf's grad() is touched.
std::vector<Tensor> grad(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                         const GradOptions& options = {});

/// Calls `hook` with the complete gradient of `t` in every backward; what it returns replaces the gradient.
HookHandle register_hook(const Tensor& t, GradientHook hook);
/// Calls `hook` after a leaf's gradient has been accumulated, as soon as its last contribution has arrived.
HookHandle register_post_accumulate_grad_hook(const Tensor& leaf, LeafHook hook);
/// Hands a complete gradient to a leaf as a backward would: its hooks run, and it is added to the leaf's gradient, or
/// becomes that. Throws Error when it does not fit the leaf.
void accumulate_grad(const Tensor& leaf, Tensor gradient);
/// Calls `callback` on the calling thread at the end of the backward that is running; Error outside of one. A
/// backward that throws destroys its callbacks without calling them.
void queue_callback(UniqueFunction<void()> callback);
/// True at the first call with this key in the backward that is running, false at later ones; Error outside of one.
bool first_in_backward(const void* key);
/// Whether the backward that is running adds to the gradients of leaves, which that of `grad` does not; Error outside
/// of one.
bool accumulates_gradients();
/// Whether the graph of the backward that is running leads to this leaf; Error outside of one.
bool reaches(const Tensor& leaf);

}  // namespace tandem::autograd
