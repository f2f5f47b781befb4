// Stochastic gradient descent, with momentum, Nesterov's variant, dampening and weight decay.
#pragma once
#include <initializer_list>
#include <optional>

#include <tandem/optim/optimizer.h>

namespace tandem {
struct SGDArgs;
}

namespace tandem::optim {

/// Settings of SGD; defaults as in PyTorch.
struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
};

/// Parameters with settings of their own; what is left out is taken from the optimizer's options.
struct SGDGroup {
  std::vector<Tensor> params = {};
  std::optional<double> lr = {};
  std::optional<double> momentum = {};
  std::optional<double> dampening = {};
  std::optional<double> weight_decay = {};
  std::optional<bool> nesterov = {};
};

/// g += weight_decay p;  b = g at a parameter's first step, later momentum b + (1 - dampening) g;
/// p -= lr b, or lr (g + momentum b) with `nesterov`.
class SGD final : public Optimizer {
 public:
  using Options = SGDOptions;
  /// Throws Error for a parameter that is given twice, not a leaf, not contiguous or not real, for settings that are
  /// negative or not finite, and for `nesterov` without momentum or with dampening.
  explicit SGD(std::vector<Tensor> parameters, const SGDOptions& options = {});
  /// Groups, as in SGD({{.params = a}, {.params = b, .lr = 0.01}}, {.lr = 0.1}).
  explicit SGD(std::initializer_list<SGDGroup> groups, const SGDOptions& options = {})
      : SGD(std::vector<SGDGroup>(groups), options) {}
  explicit SGD(std::vector<SGDGroup> groups, const SGDOptions& options = {});
  /// Throws as the constructor does, and then has added nothing.
  void add_param_group(SGDGroup group);

 protected:
  std::string name() const override { return "SGD"; }
  Settings settings(std::size_t group) const override;
  void set_settings(std::size_t group, std::span<const double> values) override;
  std::string settings_problem(std::span<const double> values) const override;
  std::vector<std::string> buffer_names(std::span<const double> values) const override;
  void update(std::size_t group, std::span<const Update> updates) override;

 private:
  std::vector<SGDArgs> arguments(std::size_t group, std::span<const Update> updates) const;

  SGDOptions defaults_;
  std::vector<SGDOptions> options_;  // by group
};

}  // namespace tandem::optim
