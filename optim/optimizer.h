// What all optimizers share: parameters in groups, their state, and saving it. A method supplies its settings and one
// call of a fused kernel for those of a group, device and type.
#pragma once
#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <tandem/optim/settings.h>
#include <tandem/tensor/callable.h>
#include <tandem/tensor/io/state.h>
#include <tandem/tensor/view.h>

namespace tandem::optim {

/// Base of all optimizers: groups of parameters with settings, and a state for each parameter.
class Optimizer : public Stateful {
 public:
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Updates every parameter that has a gradient, in place; one without is skipped and gets no state. The state is kept
  /// where the parameter is, also after the model has moved. Throws Error, before anything is changed, when a parameter
  /// no longer fits its gradient or its state.
  void step();
  /// Makes all gradients undefined.
  void zero_grad();
  /// All parameters, group after group.
  std::vector<Tensor> parameters() const;

  /// The method: "SGD", "Adam", ...
  virtual std::string name() const = 0;
  std::size_t group_count() const { return group_sizes_.size(); }
  /// Learning rate of a group.
  double lr(std::size_t group = 0) const;
  /// Throws Error when `lr` is negative or not finite.
  void set_lr(std::size_t group, double lr);
  /// Sets the learning rate of all groups.
  void set_lr(double lr);

  std::string state_name() const override { return "optimizer"; }
  /// For parameter i, once it has been stepped, "i.step" and its buffers ("i.exp_avg", ...); for group k, its settings
  /// ("group.k.lr", ...) and number of parameters.
  NamedTensors state_dict() const override;
  std::vector<std::string> state_problems(const NamedTensors& state) const override;
  /// The saved settings replace those given at construction, so that training goes on as if it had never stopped.
  void load_state_dict(const NamedTensors& state) override;

 protected:
  static constexpr std::size_t kMaxBuffers = 3;
  /// What one call of a kernel works on. All views have the same number of elements and are dense, so an update of a
  /// part of a parameter is the same call with all of them narrowed.
  struct Update {
    View parameter, gradient;
    std::array<View, kMaxBuffers> buffers;  // in the order of buffer_names; null where there is none
    int64_t step = 1;                       // counts from 1
    std::size_t index = 0;                  // of the parameter
  };

  Optimizer() = default;
  /// Adds a group whose settings have been stored as those of group number group_count(). Throws Error unless all are
  /// dense, real leaves that no group has yet.
  void append_group(std::vector<Tensor> parameters);
  /// Throws Error with the sentence of settings_problem.
  void check_settings(const Settings& settings) const;

  /// What governs the updates of a group, the learning rate first.
  virtual Settings settings(std::size_t group) const = 0;
  /// Takes over values in the order of settings().
  virtual void set_settings(std::size_t group, std::span<const double> values) = 0;
  /// What is wrong with such values and what to do; empty when nothing is.
  virtual std::string settings_problem(std::span<const double> values) const = 0;
  /// The buffers that a parameter of a group with such settings has.
  virtual std::vector<std::string> buffer_names(std::span<const double> values) const = 0;
  /// Calls the kernel, once for all these updates of one group, device and type. Where several CPU devices share a
  /// parameter, each updates its part, all at the same time; so this writes to nothing but the views.
  virtual void update(std::size_t group, std::span<const Update> updates) = 0;
  /// What is done before each replay of captured updates.
  struct Replayed {
    UniqueFunction<void()> check;  // throws Error when the optimizer is gone or memory of the parameters is another
    UniqueFunction<std::span<const Update>()> next;  // counts a step and gives the updates of that step
  };
  /// For updates that are captured in a graph, which then are not counted as a step. Throws Error where a buffer has
  /// not been made by an ordinary step before.
  Replayed replayed(std::span<const Update> updates);

 private:
  struct Slot {
    Tensor parameter;
    std::size_t group = 0;
    int64_t steps = 0;
    std::vector<Tensor> buffers;  // made at the first step
  };
  struct Work;
  struct Loaded {
    std::vector<std::vector<double>> settings;  // by group
    std::vector<Slot> slots;                    // with the saved buffers
  };
  std::vector<std::string> read(const NamedTensors& state, Loaded& loaded) const;
  void check_group(std::size_t group) const;
  std::vector<double> setting_values(std::size_t group) const;
  Tensor checked_gradient(std::size_t index) const;
  void prepare_buffers(Slot& slot) const;
  void run(std::span<const Work> works, int device);

  std::vector<Slot> slots_;
  std::vector<std::size_t> group_sizes_;
  bool captured_ = false;  // whether the step under way goes into a graph
  std::shared_ptr<const void> alive_ = std::make_shared<char>();
};

// For a class that divides an optimizer's work in a way of its own.

/// Throws Error unless all are dense, real leaves, each given once.
void check_parameters(const std::string& op, std::span<const Tensor> parameters);
/// Calls the hooks that wait for the first step of these parameters, each once; those that have returned are gone.
void call_first_step_hooks(std::span<const Tensor> parameters, const Stateful& optimizer);

}  // namespace tandem::optim
