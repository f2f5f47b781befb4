#include <tandem/nn/utils.h>

#include <cmath>
#include <unordered_set>

#include <tandem/autograd/functions.h>
#include <tandem/autograd/grad_mode.h>

namespace tandem::nn::utils {
namespace {

std::vector<Tensor> gradients_of(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> out;
  std::unordered_set<const void*> seen;  // a tensor that is given twice has one gradient
  for (const Tensor& p : parameters)
    if (Tensor g = p.grad(); g.defined() && seen.insert(p.identity().get()).second) out.push_back(std::move(g));
  return out;
}

}  // namespace

double clip_grad_norm_(const std::vector<Tensor>& parameters, double max_norm, bool error_if_nonfinite) {
  check(max_norm >= 0, "clip_grad_norm_", "max_norm is {}; it cannot be negative", max_norm);
  const NoGradGuard no_grad;
  std::vector<Tensor> gradients = gradients_of(parameters), norms;
  for (const Tensor& g : gradients) norms.push_back(norm(g));
  double squares = 0;  // read after all are under way, so that a GPU is waited for once
  for (const Tensor& n : norms) squares += std::pow(n.item<double>(), 2);
  const double total = std::sqrt(squares);
  check(
      !error_if_nonfinite || std::isfinite(total), "clip_grad_norm_",
      "the norm of the gradients is {}; look for the first loss that is not finite, or pass error_if_nonfinite = false",
      total);
  const double factor = max_norm / (total + 1e-6);
  if (factor >= 1) return total;
  for (Tensor& g : gradients) g.mul_(factor);
  return total;
}

void clip_grad_value_(const std::vector<Tensor>& parameters, double clip_value) {
  check(clip_value >= 0, "clip_grad_value_", "clip_value is {}; it cannot be negative", clip_value);
  const NoGradGuard no_grad;
  for (Tensor& g : gradients_of(parameters)) g.copy_(clamp(g, -clip_value, clip_value));
}

}  // namespace tandem::nn::utils
