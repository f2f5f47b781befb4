// The formulas of the schedules, and their state.
#include <tandem/optim/lr_scheduler.h>

#include <cmath>
#include <numbers>

#include <tandem/optim/state_reader.h>
#include <tandem/tensor/create.h>

namespace tandem::optim {
namespace {

constexpr std::size_t kOwnWarmupSettings = 2;

std::string count_problem(std::string_view what, double value) {
  if (value >= 1 && value == std::floor(value) && std::isfinite(value)) return {};
  return fmt::format("{} is {}; it must be a whole number of at least 1", what, value);
}

}  // namespace

LRScheduler::LRScheduler(Optimizer& optimizer) : optimizer_(optimizer) {
  for (std::size_t group = 0; group < optimizer.group_count(); ++group) base_lrs_.push_back(optimizer.lr(group));
}

void LRScheduler::start() {
  const std::string problem = settings_problem(values_of(settings()));
  check(problem.empty(), name(), "{}", problem);
  go_to(0);
}

void LRScheduler::go_to(int64_t step) {
  check(optimizer_.group_count() == base_lrs_.size(), name(),
        "the optimizer has {} groups, but had {} when the schedule was made; make the schedule after all groups are "
        "added",
        optimizer_.group_count(), base_lrs_.size());
  for (std::size_t group = 0; group < base_lrs_.size(); ++group)
    optimizer_.set_lr(group, lr_at(step, base_lrs_[group]));
  step_ = step;
}

void LRScheduler::step() { go_to(step_ + 1); }

NamedTensors LRScheduler::state_dict() const {
  NamedTensors state{{"step", number_entry(step_)}, {"base_lrs", tensor(base_lrs_)}};
  for (const auto& [setting, value] : settings()) state.emplace_back(setting, number_entry(value));
  return state;
}

std::vector<std::string> LRScheduler::read(const NamedTensors& state, Loaded& loaded) const {
  StateReader reader(state);
  loaded.step = reader.integer("step", 0);
  const auto groups = static_cast<int64_t>(optimizer_.group_count());
  if (const Tensor base = reader.values("base_lrs", {groups}, float64); base.defined())
    loaded.base_lrs = base.to_vector<double>();
  for (const double lr : loaded.base_lrs)
    if (std::string problem = range_problem({{"an entry of base_lrs", lr}}); !problem.empty()) reader.note(problem);
  bool complete = true;
  for (const auto& setting : settings()) {
    complete = complete && reader.has(setting.first);
    loaded.settings.push_back(reader.real(setting.first));
  }
  if (std::string problem = complete ? settings_problem(loaded.settings) : std::string(); !problem.empty())
    reader.note(problem);
  return reader.finish();
}

std::vector<std::string> LRScheduler::state_problems(const NamedTensors& state) const {
  Loaded loaded;
  return read(state, loaded);
}

void LRScheduler::load_state_dict(const NamedTensors& state) {
  Loaded loaded;
  check_fits(name(), "a schedule of this kind for this optimizer", read(state, loaded));
  base_lrs_ = std::move(loaded.base_lrs);
  set_settings(loaded.settings);
  go_to(loaded.step);
}

StepLR::StepLR(Optimizer& optimizer, int64_t step_size, double gamma)
    : LRScheduler(optimizer), step_size_(step_size), gamma_(gamma) {
  start();
}

double StepLR::lr_at(int64_t step, double base) const {
  const int64_t decays = step / step_size_;
  return base * std::pow(gamma_, static_cast<double>(decays));
}

Settings StepLR::settings() const { return {{"step_size", static_cast<double>(step_size_)}, {"gamma", gamma_}}; }

void StepLR::set_settings(std::span<const double> values) {
  step_size_ = static_cast<int64_t>(values[0]);
  gamma_ = values[1];
}

std::string StepLR::settings_problem(std::span<const double> values) const {
  const std::string problem = count_problem("step_size", values[0]);
  return problem.empty() ? range_problem({{"gamma", values[1]}}) : problem;
}

CosineAnnealingLR::CosineAnnealingLR(Optimizer& optimizer, int64_t t_max, double eta_min)
    : LRScheduler(optimizer), t_max_(t_max), eta_min_(eta_min) {
  start();
}

double CosineAnnealingLR::lr_at(int64_t step, double base) const {
  const double angle = std::numbers::pi * static_cast<double>(step) / static_cast<double>(t_max_);
  return eta_min_ + (base - eta_min_) * (1 + std::cos(angle)) / 2;
}

Settings CosineAnnealingLR::settings() const { return {{"t_max", static_cast<double>(t_max_)}, {"eta_min", eta_min_}}; }

void CosineAnnealingLR::set_settings(std::span<const double> values) {
  t_max_ = static_cast<int64_t>(values[0]);
  eta_min_ = values[1];
}

std::string CosineAnnealingLR::settings_problem(std::span<const double> values) const {
  const std::string problem = count_problem("t_max", values[0]);
  return problem.empty() ? range_problem({{"eta_min", values[1]}}) : problem;
}

LinearWarmup::LinearWarmup(Optimizer& optimizer, int64_t steps, double start_factor, std::shared_ptr<LRScheduler> after)
    : LRScheduler(optimizer), steps_(steps), start_factor_(start_factor), after_(std::move(after)) {
  check(after_ == nullptr || &after_->optimizer_ == &optimizer, name(),
        "the schedule that follows belongs to another optimizer; make both for the same one");
  if (after_) base_lrs_ = after_->base_lrs_;  // a warm-up in `after` has lowered the optimizer's rates
  start();
}

double LinearWarmup::lr_at(int64_t step, double base) const {
  if (step >= steps_) return after_ ? after_->lr_at(step - steps_, base) : base;
  return base * (start_factor_ + (1 - start_factor_) * static_cast<double>(step) / static_cast<double>(steps_));
}

Settings LinearWarmup::settings() const {
  Settings all{{"steps", static_cast<double>(steps_)}, {"start_factor", start_factor_}};
  if (after_)
    for (const auto& [setting, value] : after_->settings()) all.emplace_back("after." + setting, value);
  return all;
}

void LinearWarmup::set_settings(std::span<const double> values) {
  steps_ = static_cast<int64_t>(values[0]);
  start_factor_ = values[1];
  if (after_) after_->set_settings(values.subspan(kOwnWarmupSettings));
}

std::string LinearWarmup::settings_problem(std::span<const double> values) const {
  if (std::string problem = count_problem("steps", values[0]); !problem.empty()) return problem;
  if (!(values[1] >= 0 && values[1] <= 1))
    return fmt::format("start_factor is {}; it must be between 0 and 1", values[1]);
  return after_ ? after_->settings_problem(values.subspan(kOwnWarmupSettings)) : std::string();
}

}  // namespace tandem::optim
