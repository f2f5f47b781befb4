// The losses: how far an output is from its target. Every loss also gives its sum and its normaliser, so that the parts
// of a batch, computed in several places, combine exactly.
#pragma once
#include <string>

#include <tandem/autograd/functions.h>

namespace tandem::nn {

/// Base of all losses: an object called with an output and its target.
class Loss {
 public:
  virtual ~Loss() = default;
  /// The loss, a single number unless the reduction is none; recorded for backward.
  virtual Tensor operator()(const Tensor& input, const Tensor& target) const = 0;
  /// Sum and normaliser: their quotient is the mean, whatever the reduction is.
  virtual LossParts parts(const Tensor& input, const Tensor& target) const = 0;
  /// The normaliser of parts, as one float64 number, when the target alone tells; else undefined.
  virtual Tensor normalizer([[maybe_unused]] const Tensor& target) const { return {}; }
  Reduction reduction() const { return reduction_; }
  /// Its type and options, as "MSELoss(reduction=mean)". Ranks that train together compare it.
  std::string str() const;

 protected:
  /// `options` are the others, for str: "beta=0.5".
  explicit Loss(Reduction reduction, std::string options = {});

 private:
  Reduction reduction_;
  std::string options_;
};

using CrossEntropyLossOptions = CrossEntropyOptions;
/// cross_entropy of logits {n, classes} and labels {n}. The class weights are copied to the logits' device if they are
/// elsewhere.
class CrossEntropyLoss : public Loss {
 public:
  explicit CrossEntropyLoss(const CrossEntropyLossOptions& options = {});
  Tensor operator()(const Tensor& logits, const Tensor& labels) const override;
  LossParts parts(const Tensor& logits, const Tensor& labels) const override;
  Tensor normalizer(const Tensor& labels) const override;

 private:
  CrossEntropyLossOptions options_;
};

using NLLLossOptions = NLLOptions;
/// nll_loss of log-probabilities {n, classes} and labels {n}. The class weights are copied to the input's device if
/// they are elsewhere.
class NLLLoss : public Loss {
 public:
  explicit NLLLoss(const NLLLossOptions& options = {});
  Tensor operator()(const Tensor& log_probabilities, const Tensor& labels) const override;
  LossParts parts(const Tensor& log_probabilities, const Tensor& labels) const override;
  Tensor normalizer(const Tensor& labels) const override;

 private:
  NLLLossOptions options_;
};

/// How the squared differences are combined.
struct MSELossOptions {
  Reduction reduction = Reduction::mean;
};
/// mse_loss of two tensors of one shape.
class MSELoss : public Loss {
 public:
  explicit MSELoss(const MSELossOptions& options = {});
  Tensor operator()(const Tensor& input, const Tensor& target) const override;
  LossParts parts(const Tensor& input, const Tensor& target) const override;
  Tensor normalizer(const Tensor& target) const override;
};

}  // namespace tandem::nn
