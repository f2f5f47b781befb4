// Adam and AdamW: steps scaled by running means of the gradient and its square. They differ in the weight decay only.
#pragma once
#include <array>
#include <initializer_list>
#include <optional>

#include <tandem/optim/optimizer.h>

namespace tandem {
struct AdamArgs;
}

namespace tandem::optim {

/// Settings of Adam; defaults as in PyTorch.
struct AdamOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
};

/// As AdamOptions, but with PyTorch's default for the decay.
struct AdamWOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
};

/// Parameters with settings of their own; what is left out is taken from the optimizer's options.
struct AdamGroup {
  std::vector<Tensor> params = {};
  std::optional<double> lr = {};
  std::optional<std::array<double, 2>> betas = {};
  std::optional<double> eps = {};
  std::optional<double> weight_decay = {};
  std::optional<bool> amsgrad = {};
};
using AdamWGroup = AdamGroup;

/// g += weight_decay p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g g;
/// p -= lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps), where `amsgrad` takes the largest v so far.
class Adam : public Optimizer {
 public:
  using Options = AdamOptions;
  /// Throws Error for a parameter that is given twice, not a leaf, not contiguous or not real, for settings that are
  /// negative or not finite, and for betas of 1 or more.
  explicit Adam(std::vector<Tensor> parameters, const AdamOptions& options = {});
  /// Groups, as in Adam({{.params = a}, {.params = b, .lr = 0.01}}, {.lr = 0.1}).
  explicit Adam(std::initializer_list<AdamGroup> groups, const AdamOptions& options = {})
      : Adam(std::vector<AdamGroup>(groups), options) {}
  explicit Adam(std::vector<AdamGroup> groups, const AdamOptions& options = {});
  /// Throws as the constructor does, and then has added nothing.
  void add_param_group(AdamGroup group);

 protected:
  Adam(bool decoupled, std::vector<AdamGroup> groups, const AdamOptions& options);
  std::string name() const override { return decoupled_ ? "AdamW" : "Adam"; }
  Settings settings(std::size_t group) const override;
  void set_settings(std::size_t group, std::span<const double> values) override;
  std::string settings_problem(std::span<const double> values) const override;
  std::vector<std::string> buffer_names(std::span<const double> values) const override;
  void update(std::size_t group, std::span<const Update> updates) override;

 private:
  std::vector<AdamArgs> arguments(std::size_t group, std::span<const Update> updates) const;

  bool decoupled_;
  AdamOptions defaults_;
  std::vector<AdamOptions> options_;  // by group
};

/// Adam whose decay is apart from the gradient: p *= 1 - lr weight_decay, then Adam's step without decay.
class AdamW final : public Adam {
 public:
  using Options = AdamWOptions;
  explicit AdamW(std::vector<Tensor> parameters, const AdamWOptions& options = {});
  explicit AdamW(std::initializer_list<AdamWGroup> groups, const AdamWOptions& options = {})
      : AdamW(std::vector<AdamWGroup>(groups), options) {}
  explicit AdamW(std::vector<AdamWGroup> groups, const AdamWOptions& options = {});
};

}  // namespace tandem::optim
