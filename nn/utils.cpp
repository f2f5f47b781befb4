#include <tandem/nn/utils.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include <tandem/autograd/functions.h>
#include <tandem/autograd/grad_mode.h>
#include <tandem/tensor/create.h>

namespace tandem::nn::utils {
namespace {

std::vector<Tensor> gradients_of(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> out;
  std::unordered_set<const void*> seen;  // a tensor that is given twice has one gradient
  for (const Tensor& p : parameters)
    if (Tensor g = p.grad(); g.defined() && seen.insert(p.identity().get()).second) out.push_back(std::move(g));
  return out;
}

void scale(std::vector<Tensor>& gradients, double max_norm, const Tensor& total_norm) {
  const Tensor factor = clamp(max_norm / (total_norm + 1e-6), 0, 1);
  if (factor.device().is_cpu() && factor.item<double>() == 1) return;
  for (Tensor& g : gradients) g.mul_(factor.to(g.device()));
}

void check_max_norm(const char* function, double max_norm) {
  check(max_norm >= 0, function, "max_norm is {}; it cannot be negative", max_norm);
}

}  // namespace

Tensor get_total_norm(const std::vector<Tensor>& tensors) {
  const NoGradGuard no_grad;
  std::vector<Tensor> norms;
  for (const Tensor& t : tensors)
    if (t.defined()) norms.push_back(norm(t).to(float64));
  const auto on_gpu = [](const Tensor& t) { return t.device().is_cuda(); };
  const auto gpu = std::find_if(norms.begin(), norms.end(), on_gpu);
  if (gpu == norms.end()) {
    double squares = 0;
    for (const Tensor& n : norms) squares += std::pow(n.item<double>(), 2);
    return tensor(std::sqrt(squares), {.dtype = float64});
  }
  const Device device = gpu->device();
  for (Tensor& n : norms) n = n.to(device);
  return norm(stack(norms));
}

void clip_grads_with_norm_(const std::vector<Tensor>& parameters, double max_norm, const Tensor& total_norm) {
  check_max_norm("clip_grads_with_norm_", max_norm);
  check(total_norm.defined() && total_norm.numel() == 1, "clip_grads_with_norm_",
        "total_norm is not one number; give what get_total_norm gives for the gradients");
  const NoGradGuard no_grad;
  std::vector<Tensor> gradients = gradients_of(parameters);
  scale(gradients, max_norm, total_norm);
}

double clip_grad_norm_(const std::vector<Tensor>& parameters, double max_norm, bool error_if_nonfinite) {
  check_max_norm("clip_grad_norm_", max_norm);
  const NoGradGuard no_grad;
  std::vector<Tensor> gradients = gradients_of(parameters);
  const Tensor norm_of_all = get_total_norm(gradients);
  const auto total = norm_of_all.item<double>();
  check(
      !error_if_nonfinite || std::isfinite(total), "clip_grad_norm_",
      "the norm of the gradients is {}; look for the first loss that is not finite, or pass error_if_nonfinite = false",
      total);
  scale(gradients, max_norm, norm_of_all);
  return total;
}

void clip_grad_value_(const std::vector<Tensor>& parameters, double clip_value) {
  check(clip_value >= 0, "clip_grad_value_", "clip_value is {}; it cannot be negative", clip_value);
  const NoGradGuard no_grad;
  for (Tensor& g : gradients_of(parameters)) g.copy_(clamp(g, -clip_value, clip_value));
}

}  // namespace tandem::nn::utils
