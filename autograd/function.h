// Function: an operation with a backward of one's own.
//
//   struct Cube : autograd::Function<Cube> {
//     Tensor forward(autograd::Context& context, const Tensor& x) {
//       context.save_for_backward({x});
//       return x * x * x;
//     }
//     std::vector<Tensor> backward(autograd::Context& context, const std::vector<Tensor>& gradients) {
//       return {gradients[0] * 3 * pow(context.saved(0), 2)};
//     }
//   };
//   Tensor y = Cube::apply(x);
#pragma once
#include <vector>

#include <tandem/autograd/node.h>

namespace tandem::autograd {

/// What a Function keeps between forward and backward. Each call has its own, and its own Function object, whose
/// members may hold anything that is not a tensor.
class Context {
 public:
  /// Keeps tensors for backward; a later change in place of one of them is an error there.
  void save_for_backward(const std::vector<Tensor>& tensors) {
    saved_.clear();
    for (const Tensor& t : tensors) saved_.emplace_back(t);
  }
  /// The i-th tensor given to save_for_backward.
  const Tensor& saved(std::size_t i) const {
    check(i < saved_.size(), "Function", "saved({}) was asked for, but {} tensors were saved", i, saved_.size());
    return saved_[i].get("Function");
  }
  /// Whether the gradient of the i-th tensor argument is needed.
  bool needs_input_grad(std::size_t i) const { return i < needs_.size() && needs_[i]; }

 private:
  template <class Derived>
  friend struct Function;
  std::vector<Saved> saved_;
  std::vector<bool> needs_;
};

/// An operation defined by hand: derive from Function<Derived> with static forward and backward.
template <class Derived>
struct Function {
  /// Runs forward without recording, and records backward when a tensor argument requires grad. Arguments may be of any
  /// type; backward returns one gradient for each Tensor among them, in order, undefined where there is none.
  template <class... A>
  static auto apply(const A&... arguments) {
    struct UserNode final : Node {
      UserNode() : Node("Function") {}
      void backward(Gradients& gradients) override {
        std::vector<Tensor> out;
        for (std::size_t i = 0; i < outputs.size(); ++i) out.push_back(gradients[i]);
        std::vector<Tensor> in = function.backward(context, out);
        check(in.size() == inputs.size(), "Function", "backward returned {} gradients for {} tensor arguments",
              in.size(), inputs.size());
        for (std::size_t i = 0; i < in.size(); ++i) gradients.set(i, std::move(in[i]));
      }
      void release() override { context = {}; }
      Derived function;
      Context context;
    };
    auto node = std::make_shared<UserNode>();
    std::vector<const Tensor*> tensors;
    (add_if_tensor(arguments, tensors), ...);
    for (const Tensor* t : tensors) node->context.needs_.push_back(needs_grad(*t));
    auto results = [&] {
      const NoGradGuard no_grad;
      return node->function.forward(node->context, arguments...);
    }();
    bool record = false;
    for (const bool need : node->context.needs_) record |= need;
    if (!record) return results;
    std::vector<Tensor*> outputs;
    if constexpr (std::is_same_v<decltype(results), Tensor>)
      outputs.push_back(&results);
    else
      for (Tensor& t : results) outputs.push_back(&t);
    for (Tensor* t : outputs) *t = t->detach();  // an argument that is returned keeps its own history
    connect(std::move(node), tensors, outputs);
    return results;
  }

 private:
  template <class T>
  static void add_if_tensor(const T& argument, std::vector<const Tensor*>& tensors) {
    if constexpr (std::is_convertible_v<const T*, const Tensor*>) tensors.push_back(&argument);
  }
};

}  // namespace tandem::autograd
