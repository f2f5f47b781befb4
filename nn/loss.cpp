#include <tandem/nn/loss.h>

#include <string_view>

#include <fmt/ranges.h>

#include <tandem/autograd/grad_mode.h>
#include <tandem/nn/internal.h>
#include <tandem/tensor/create.h>

namespace tandem::nn {
namespace {

// A loss is computed where its input is: on several devices at once in a data-parallel model.
template <class Options>
Options placed(Options options, const Tensor& input) {
  if (options.weight.defined()) options.weight = options.weight.to(input.device());
  return options;
}

// The weights of the labels that are not ignored. A label out of range is an error of the loss itself, later. Those of
// labels on a GPU, for which the host would have to wait, come with the loss's parts.
template <class Options>
Tensor weights_of(const Tensor& labels, const Options& options) {
  const NoGradGuard no_grad;
  if (labels.dtype() != int64 || labels.device().is_cuda()) return {};
  std::vector<double> weights;
  if (options.weight.defined()) weights = options.weight.template to_vector<double>();
  const auto classes = static_cast<int64_t>(weights.size());
  double sum = 0;
  for (const int64_t label : labels.to_vector<int64_t>()) {
    if (label == options.ignore_index) continue;
    if (weights.empty())
      sum += 1;
    else if (label >= 0 && label < classes)
      sum += weights[static_cast<std::size_t>(label)];
  }
  return full({}, sum, {.dtype = float64});
}

// The options for str. Of many weights a hash stands for all.
template <class Options>
std::string text_of(const Options& options) {
  std::string text = fmt::format("ignore_index={}", options.ignore_index);
  if (!options.weight.defined()) return text;
  const std::vector<double> weights = options.weight.template to_vector<double>();
  if (weights.size() <= 16) return fmt::format("{}, weight=[{}]", text, fmt::join(weights, ", "));
  const std::string_view bytes(reinterpret_cast<const char*>(weights.data()), weights.size() * sizeof(double));
  return fmt::format("{}, weight={} numbers with the hash {:016x}", text, weights.size(),
                     std::hash<std::string_view>()(bytes));
}

}  // namespace

Loss::Loss(Reduction reduction, std::string options) : reduction_(reduction), options_(std::move(options)) {}
std::string Loss::str() const {
  constexpr const char* kReductions[] = {"mean", "sum", "none"};
  return fmt::format("{}(reduction={}{}{})", kind_of(typeid(*this)), kReductions[static_cast<int>(reduction_)],
                     options_.empty() ? "" : ", ", options_);
}

CrossEntropyLoss::CrossEntropyLoss(const CrossEntropyLossOptions& options)
    : Loss(options.reduction, fmt::format("{}, label_smoothing={}", text_of(options), options.label_smoothing)),
      options_(options) {}
Tensor CrossEntropyLoss::operator()(const Tensor& logits, const Tensor& labels) const {
  return cross_entropy(logits, labels, placed(options_, logits));
}
LossParts CrossEntropyLoss::parts(const Tensor& logits, const Tensor& labels) const {
  return cross_entropy_parts(logits, labels, placed(options_, logits));
}
Tensor CrossEntropyLoss::normalizer(const Tensor& labels) const { return weights_of(labels, options_); }

NLLLoss::NLLLoss(const NLLLossOptions& options) : Loss(options.reduction, text_of(options)), options_(options) {}
Tensor NLLLoss::operator()(const Tensor& log_probabilities, const Tensor& labels) const {
  return nll_loss(log_probabilities, labels, placed(options_, log_probabilities));
}
LossParts NLLLoss::parts(const Tensor& log_probabilities, const Tensor& labels) const {
  return nll_loss_parts(log_probabilities, labels, placed(options_, log_probabilities));
}
Tensor NLLLoss::normalizer(const Tensor& labels) const { return weights_of(labels, options_); }

MSELoss::MSELoss(const MSELossOptions& options) : Loss(options.reduction) {}
Tensor MSELoss::operator()(const Tensor& input, const Tensor& target) const {
  return mse_loss(input, target, reduction());
}
LossParts MSELoss::parts(const Tensor& input, const Tensor& target) const { return mse_loss_parts(input, target); }
Tensor MSELoss::normalizer(const Tensor& target) const {
  return full({}, static_cast<double>(target.numel()), {.dtype = float64});
}

}  // namespace tandem::nn
