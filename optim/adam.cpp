// Settings of Adam and AdamW, their checks, and the call of the kernel.
#include <tandem/optim/adam.h>

#include <tandem/tensor/backend.h>

namespace tandem::optim {
namespace {

Settings adam_settings(const AdamOptions& o) {
  return {{"lr", o.lr},
          {"beta1", o.betas[0]},
          {"beta2", o.betas[1]},
          {"eps", o.eps},
          {"weight_decay", o.weight_decay},
          {"amsgrad", o.amsgrad ? 1 : 0}};
}

AdamOptions adam_options(std::span<const double> v) {
  return {.lr = v[0], .betas = {v[1], v[2]}, .eps = v[3], .weight_decay = v[4], .amsgrad = v[5] != 0};
}

AdamOptions to_adam(const AdamWOptions& o) {
  return {.lr = o.lr, .betas = o.betas, .eps = o.eps, .weight_decay = o.weight_decay, .amsgrad = o.amsgrad};
}

std::vector<AdamGroup> one_group(std::vector<Tensor> parameters) {
  std::vector<AdamGroup> groups(1);
  groups.front().params = std::move(parameters);
  return groups;
}

}  // namespace

Adam::Adam(std::vector<Tensor> parameters, const AdamOptions& options)
    : Adam(false, one_group(std::move(parameters)), options) {}

Adam::Adam(std::vector<AdamGroup> groups, const AdamOptions& options) : Adam(false, std::move(groups), options) {}

AdamW::AdamW(std::vector<Tensor> parameters, const AdamWOptions& options)
    : Adam(true, one_group(std::move(parameters)), to_adam(options)) {}

AdamW::AdamW(std::vector<AdamWGroup> groups, const AdamWOptions& options)
    : Adam(true, std::move(groups), to_adam(options)) {}

Adam::Adam(bool decoupled, std::vector<AdamGroup> groups, const AdamOptions& options)
    : decoupled_(decoupled), defaults_(options) {
  check(!groups.empty(), Adam::name(), "the list of groups is empty; pass at least one group of parameters");
  check_settings(adam_settings(defaults_));
  for (AdamGroup& group : groups) add_param_group(std::move(group));
}

void Adam::add_param_group(AdamGroup group) {
  const AdamOptions options{.lr = group.lr.value_or(defaults_.lr),
                            .betas = group.betas.value_or(defaults_.betas),
                            .eps = group.eps.value_or(defaults_.eps),
                            .weight_decay = group.weight_decay.value_or(defaults_.weight_decay),
                            .amsgrad = group.amsgrad.value_or(defaults_.amsgrad)};
  check_settings(adam_settings(options));
  append_group(std::move(group.params));
  options_.push_back(options);
}

Settings Adam::settings(std::size_t group) const { return adam_settings(options_[group]); }

void Adam::set_settings(std::size_t group, std::span<const double> values) { options_[group] = adam_options(values); }

std::string Adam::settings_problem(std::span<const double> values) const {
  const AdamOptions o = adam_options(values);
  if (std::string problem = range_problem(adam_settings(o)); !problem.empty()) return problem;
  if (o.betas[0] >= 1 || o.betas[1] >= 1)
    return fmt::format("betas are {} and {}; both must be below 1, such as 0.9 and 0.999", o.betas[0], o.betas[1]);
  return {};
}

std::vector<std::string> Adam::buffer_names(std::span<const double> values) const {
  std::vector<std::string> names{"exp_avg", "exp_avg_sq"};
  if (adam_options(values).amsgrad) names.emplace_back("max_exp_avg_sq");
  return names;
}

std::vector<AdamArgs> Adam::arguments(std::size_t group, std::span<const Update> updates) const {
  const AdamOptions& o = options_[group];
  std::vector<AdamArgs> args;
  args.reserve(updates.size());
  for (const Update& update : updates)
    args.push_back({.parameter = update.parameter,
                    .gradient = update.gradient,
                    .exp_avg = update.buffers[0],
                    .exp_avg_sq = update.buffers[1],
                    .max_exp_avg_sq = update.buffers[2],
                    .lr = o.lr,
                    .beta1 = o.betas[0],
                    .beta2 = o.betas[1],
                    .eps = o.eps,
                    .weight_decay = o.weight_decay,
                    .decoupled = decoupled_,
                    .step = update.step});
  return args;
}

void Adam::update(std::size_t group, std::span<const Update> updates) {
  const Backend& table = backend(updates[0].parameter.device);
  kernel(decoupled_ ? "AdamW" : "Adam", table, table.adam_step)(arguments(group, updates), [&] {
    Replayed again = replayed(updates);
    return Replay<AdamArgs>{.check = std::move(again.check),
                            .next = [this, group, next = std::move(again.next)] { return arguments(group, next()); }};
  });
}

}  // namespace tandem::optim
