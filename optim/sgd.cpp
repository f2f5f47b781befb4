// SGD's settings, their checks, and its call of the kernel.
#include <tandem/optim/sgd.h>

#include <tandem/tensor/backend.h>

namespace tandem::optim {
namespace {

Settings sgd_settings(const SGDOptions& o) {
  return {{"lr", o.lr},
          {"momentum", o.momentum},
          {"dampening", o.dampening},
          {"weight_decay", o.weight_decay},
          {"nesterov", o.nesterov ? 1 : 0}};
}

SGDOptions sgd_options(std::span<const double> v) {
  return {.lr = v[0], .momentum = v[1], .dampening = v[2], .weight_decay = v[3], .nesterov = v[4] != 0};
}

}  // namespace

SGD::SGD(std::vector<Tensor> parameters, const SGDOptions& options)
    : SGD(std::vector<SGDGroup>{{.params = std::move(parameters)}}, options) {}

SGD::SGD(std::vector<SGDGroup> groups, const SGDOptions& options) : defaults_(options) {
  check(!groups.empty(), name(), "the list of groups is empty; pass at least one group of parameters");
  check_settings(sgd_settings(defaults_));
  for (SGDGroup& group : groups) add_param_group(std::move(group));
}

void SGD::add_param_group(SGDGroup group) {
  const SGDOptions options{.lr = group.lr.value_or(defaults_.lr),
                           .momentum = group.momentum.value_or(defaults_.momentum),
                           .dampening = group.dampening.value_or(defaults_.dampening),
                           .weight_decay = group.weight_decay.value_or(defaults_.weight_decay),
                           .nesterov = group.nesterov.value_or(defaults_.nesterov)};
  check_settings(sgd_settings(options));
  append_group(std::move(group.params));
  options_.push_back(options);
}

Settings SGD::settings(std::size_t group) const { return sgd_settings(options_[group]); }

void SGD::set_settings(std::size_t group, std::span<const double> values) { options_[group] = sgd_options(values); }

std::string SGD::settings_problem(std::span<const double> values) const {
  const SGDOptions o = sgd_options(values);
  if (std::string problem = range_problem(sgd_settings(o)); !problem.empty()) return problem;
  if (o.nesterov && (o.momentum == 0 || o.dampening != 0))
    return fmt::format(
        "nesterov needs momentum and no dampening, but momentum is {} and dampening {}; set momentum, "
        "such as 0.9, and leave dampening at 0",
        o.momentum, o.dampening);
  return {};
}

std::vector<std::string> SGD::buffer_names(std::span<const double> values) const {
  if (sgd_options(values).momentum == 0) return {};
  return {"momentum_buffer"};
}

std::vector<SGDArgs> SGD::arguments(std::size_t group, std::span<const Update> updates) const {
  const SGDOptions& o = options_[group];
  std::vector<SGDArgs> args;
  args.reserve(updates.size());
  for (const Update& update : updates)
    args.push_back({.parameter = update.parameter,
                    .gradient = update.gradient,
                    .momentum_buffer = update.buffers[0],
                    .lr = o.lr,
                    .momentum = o.momentum,
                    .dampening = o.dampening,
                    .weight_decay = o.weight_decay,
                    .nesterov = o.nesterov,
                    .first_step = update.step == 1});
  return args;
}

void SGD::update(std::size_t group, std::span<const Update> updates) {
  const Backend& table = backend(updates[0].parameter.device);
  kernel("SGD", table, table.sgd_step)(arguments(group, updates), [&] {
    Replayed again = replayed(updates);
    return Replay<SGDArgs>{.check = std::move(again.check),
                           .next = [this, group, next = std::move(again.next)] { return arguments(group, next()); }};
  });
}

}  // namespace tandem::optim
