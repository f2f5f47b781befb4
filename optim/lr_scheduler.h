// Schedules of the learning rate. Each is a formula in the number of its step, so that one that was loaded goes on
// exactly. Call optimizer.step(), then schedule.step().
#pragma once
#include <memory>

#include <tandem/optim/optimizer.h>

namespace tandem::optim {

/// Base of all schedules: sets the learning rate of every group of an optimizer.
class LRScheduler : public Stateful {
 public:
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;

  /// Goes to the next step and sets the learning rate of every group from the one it had when the schedule was made.
  /// Throws Error when a group was added since.
  void step();
  /// Number of calls of step() so far.
  int64_t step_count() const { return step_; }

  std::string state_name() const override { return "scheduler"; }
  /// "step", "base_lrs" (one a group), and the schedule's own numbers.
  NamedTensors state_dict() const override;
  std::vector<std::string> state_problems(const NamedTensors& state) const override;
  /// Sets the optimizer's learning rates too. The saved numbers replace those given at construction.
  void load_state_dict(const NamedTensors& state) override;

 protected:
  /// `optimizer` must outlive the schedule.
  explicit LRScheduler(Optimizer& optimizer);
  /// Throws Error with the sentence of settings_problem; else sets the learning rates of step 0.
  void start();

 private:
  friend class LinearWarmup;
  virtual std::string name() const = 0;
  /// The learning rate at a step, counted from 0, of a group that had `base` at the start.
  virtual double lr_at(int64_t step, double base) const = 0;
  /// Names and values of the schedule's own numbers.
  virtual Settings settings() const = 0;
  /// Takes over values in the order of settings().
  virtual void set_settings(std::span<const double> values) = 0;
  /// What is wrong with such values; empty when nothing is.
  virtual std::string settings_problem(std::span<const double> values) const = 0;

  struct Loaded {
    int64_t step = 0;
    std::vector<double> base_lrs, settings;
  };
  std::vector<std::string> read(const NamedTensors& state, Loaded& loaded) const;
  void go_to(int64_t step);

  Optimizer& optimizer_;
  std::vector<double> base_lrs_;  // by group
  int64_t step_ = 0;
};

/// Multiplies the learning rate by `gamma` every `step_size` steps.
class StepLR final : public LRScheduler {
 public:
  /// Throws Error for a step_size below 1 or a negative gamma.
  StepLR(Optimizer& optimizer, int64_t step_size, double gamma = 0.1);

 private:
  std::string name() const override { return "StepLR"; }
  double lr_at(int64_t step, double base) const override;
  Settings settings() const override;
  void set_settings(std::span<const double> values) override;
  std::string settings_problem(std::span<const double> values) const override;

  int64_t step_size_;
  double gamma_;
};

/// Half a cosine from the learning rate down to `eta_min` over `t_max` steps; then up again, as in PyTorch.
class CosineAnnealingLR final : public LRScheduler {
 public:
  /// Throws Error for a t_max below 1 or a negative eta_min.
  CosineAnnealingLR(Optimizer& optimizer, int64_t t_max, double eta_min = 0);

 private:
  std::string name() const override { return "CosineAnnealingLR"; }
  double lr_at(int64_t step, double base) const override;
  Settings settings() const override;
  void set_settings(std::span<const double> values) override;
  std::string settings_problem(std::span<const double> values) const override;

  int64_t t_max_;
  double eta_min_;
};

/// From start_factor times the learning rate, set at once, in equal steps up to the learning rate after `steps` steps.
/// Then the learning rate stays, or follows the schedule `after`, which counts its steps from there:
/// LinearWarmup(optimizer, 500, 0.01, std::make_shared<CosineAnnealingLR>(optimizer, 10'000)).
class LinearWarmup final : public LRScheduler {
 public:
  /// Throws Error for `steps` below 1 or a start_factor outside 0 .. 1, or when `after` belongs to another optimizer.
  LinearWarmup(Optimizer& optimizer, int64_t steps, double start_factor = 1.0 / 3,
               std::shared_ptr<LRScheduler> after = nullptr);

 private:
  std::string name() const override { return "LinearWarmup"; }
  double lr_at(int64_t step, double base) const override;
  Settings settings() const override;
  void set_settings(std::span<const double> values) override;
  std::string settings_problem(std::span<const double> values) const override;

  int64_t steps_;
  double start_factor_;
  std::shared_ptr<LRScheduler> after_;
};

}  // namespace tandem::optim
