#include <tandem/autograd/gradcheck.h>

#include <cmath>

#include <tandem/autograd/engine.h>
#include <tandem/autograd/grad_mode.h>
#include <tandem/tensor/create.h>

namespace tandem::autograd {
namespace {

std::vector<std::vector<double>> values(const std::vector<Tensor>& tensors) {
  std::vector<std::vector<double>> result;
  for (const Tensor& t : tensors) result.push_back(t.to_vector<double>());
  return result;
}

}  // namespace

bool gradcheck(FunctionRef<std::vector<Tensor>(const std::vector<Tensor>&)> function, const std::vector<Tensor>& inputs,
               const GradcheckOptions& options) {
  bool any = false;
  for (const Tensor& input : inputs) {
    if (!input.requires_grad()) continue;
    any = true;
    check(input.dtype() == float64 && input.is_contiguous(), "gradcheck",
          "needs contiguous float64 inputs; one is {} of shape {}", input.dtype(), input.shape());
  }
  check(any, "gradcheck", "no input requires grad; call requires_grad_() on those to be checked");
  const std::vector<Tensor> outputs = function(inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].requires_grad()) continue;
    // numerical[o][k][e]: derivative of element k of output o with respect to element e of this input
    Tensor changed = inputs[i].detach().clone();
    std::vector<Tensor> arguments = inputs;
    arguments[i] = changed;
    std::vector<std::vector<std::vector<double>>> numerical(outputs.size());
    for (std::size_t o = 0; o < outputs.size(); ++o) numerical[o].resize(static_cast<std::size_t>(outputs[o].numel()));
    for (int64_t e = 0; e < changed.numel(); ++e) {
      const NoGradGuard no_grad;
      const double x = changed.data<double>()[e];
      changed.data<double>()[e] = x + options.eps;
      const auto above = values(function(arguments));
      changed.data<double>()[e] = x - options.eps;
      const auto below = values(function(arguments));
      changed.data<double>()[e] = x;
      for (std::size_t o = 0; o < outputs.size(); ++o)
        for (std::size_t k = 0; k < above[o].size(); ++k)
          numerical[o][k].push_back((above[o][k] - below[o][k]) / (2 * options.eps));
    }
    for (std::size_t o = 0; o < outputs.size(); ++o) {
      for (int64_t k = 0; k < outputs[o].numel(); ++k) {
        std::vector<double> analytic(static_cast<std::size_t>(changed.numel()), 0.0);
        if (outputs[o].requires_grad()) {
          Tensor one = zeros_like(outputs[o]).contiguous();
          one.view({-1}).select(0, k).fill_(1);
          const Tensor g =
              grad({outputs[o]}, {inputs[i]}, {.grad_outputs = {one}, .retain_graph = true, .allow_unused = true})[0];
          if (g.defined()) analytic = g.to_vector<double>();
        }
        for (std::size_t e = 0; e < analytic.size(); ++e) {
          const double expected = numerical[o][static_cast<std::size_t>(k)][e];
          check(
              std::abs(analytic[e] - expected) <= options.atol + options.rtol * std::abs(expected), "gradcheck",
              "the derivative of output {}, element {}, with respect to input {}, element {}, is {} by backward but {} "
              "by differences",
              o, k, i, e, analytic[e], expected);
        }
      }
    }
  }
  return true;
}

bool gradcheck(FunctionRef<Tensor(const std::vector<Tensor>&)> function, const std::vector<Tensor>& inputs,
               const GradcheckOptions& options) {
  auto as_list = [&](const std::vector<Tensor>& arguments) { return std::vector<Tensor>{function(arguments)}; };
  return gradcheck(FunctionRef<std::vector<Tensor>(const std::vector<Tensor>&)>(as_list), inputs, options);
}

}  // namespace tandem::autograd
