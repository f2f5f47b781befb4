#include <tandem/nn/loss.h>

namespace tandem::nn {
namespace {

// A loss is computed where its input is: on several devices at once in a data-parallel model.
template <class Options>
Options placed(Options options, const Tensor& input) {
  if (options.weight.defined()) options.weight = options.weight.to(input.device());
  return options;
}

}  // namespace

CrossEntropyLoss::CrossEntropyLoss(const CrossEntropyLossOptions& options)
    : Loss(options.reduction), options_(options) {}
Tensor CrossEntropyLoss::operator()(const Tensor& logits, const Tensor& labels) const {
  return cross_entropy(logits, labels, placed(options_, logits));
}
LossParts CrossEntropyLoss::parts(const Tensor& logits, const Tensor& labels) const {
  return cross_entropy_parts(logits, labels, placed(options_, logits));
}

NLLLoss::NLLLoss(const NLLLossOptions& options) : Loss(options.reduction), options_(options) {}
Tensor NLLLoss::operator()(const Tensor& log_probabilities, const Tensor& labels) const {
  return nll_loss(log_probabilities, labels, placed(options_, log_probabilities));
}
LossParts NLLLoss::parts(const Tensor& log_probabilities, const Tensor& labels) const {
  return nll_loss_parts(log_probabilities, labels, placed(options_, log_probabilities));
}

MSELoss::MSELoss(const MSELossOptions& options) : Loss(options.reduction) {}
Tensor MSELoss::operator()(const Tensor& input, const Tensor& target) const {
  return mse_loss(input, target, reduction());
}
LossParts MSELoss::parts(const Tensor& input, const Tensor& target) const { return mse_loss_parts(input, target); }

}  // namespace tandem::nn
