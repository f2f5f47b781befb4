// The model of the cases of communication hooks.
#pragma once
#include <tandem/tests/parallel/ddp_cases.h>

namespace tandem::test {

// The two layers of a model of which a step may use one.
struct HookNet : nn::Module {
  explicit HookNet(DType dtype) {
    to(dtype);
    fill(*this);
  }
  Tensor forward(const Tensor& x) override { return c(relu(use_b ? a(x) + b(x) : a(x))); }
  nn::Linear a = register_module("a", nn::Linear(6, 8)), b = register_module("b", nn::Linear(6, 8)),
             c = register_module("c", nn::Linear(8, 3));
  bool use_b = true;
};

// What a backward of this rank gives, and of all ranks in a step where odd ranks leave b out.
inline void backward(nn::Module& model, HookNet& net, DType dtype, int rank, int step, bool leave_out) {
  net.use_b = !leave_out || (rank % 2 == 0 && step % 2 == 0);
  mean(pow(model(wave({4, 6}, rank + 0.3 * step, dtype)), 2)).backward();
}

// After an error two float64 models take a step without leftovers, and get the same gradients.
inline void require_good_step(nn::Module& model, HookNet& net, nn::Module& reference, HookNet& plain, int rank) {
  net.zero_grad();
  plain.zero_grad();
  backward(model, net, float64, rank, 0, false);
  backward(reference, plain, float64, rank, 0, false);
  for (std::size_t i = 0; i < 6; ++i)
    require_close(net.parameters()[i].grad(), plain.parameters()[i].grad(), 1e-12, "the step after an error");
  net.zero_grad();
}

}  // namespace tandem::test
