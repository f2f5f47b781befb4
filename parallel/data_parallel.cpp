#include <tandem/parallel/data_parallel.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include <tandem/autograd/functions.h>
#include <tandem/autograd/grad_mode.h>
#include <tandem/parallel/on_device.h>
#include <tandem/parallel/replicas.h>
#include <tandem/parallel/reproducible.h>
#include <tandem/parallel/scatter_gather.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/trace.h>

namespace tandem::parallel {
struct DataParallel::State {
  State(std::shared_ptr<nn::Module> wrapped, const DataParallelOptions& options)
      : module(std::move(wrapped)), placement(*module, options), check_every(options.check_every) {
    check(check_every >= 0, "DataParallel", "check_every is {}; give a number of steps, or 0 for never", check_every);
    for (const Device device : placement.devices)
      if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
  }

  std::shared_ptr<nn::Module> module;
  Placement placement;
  std::vector<Device> devices;
  int64_t check_every;
  std::atomic<int64_t> steps = 0;  // recorded forwards so far
  std::shared_ptr<PhaseLog> log = std::make_shared<PhaseLog>(placement.devices.front());
  std::mutex mutex;
  std::shared_ptr<Replicas> bound;  // made anew when the module's memory is another

  bool alone() const { return placement.devices.size() == 1; }
  bool reproducible() const { return placement.shards > 0; }
  const Device& first() const { return devices.front(); }

  std::shared_ptr<Replicas> replicas() {
    const std::lock_guard lock(mutex);
    if (!bound || !bound->current())
      bound = std::make_shared<Replicas>(module, placement.devices, log, FixedSums{.on = placement.shards > 0});
    return bound;
  }

  // After a forward: every N-th that is recorded looks whether the replicas are alike.
  void check_now_and_then(const Replicas& used) {
    if (check_every == 0 || !grad_enabled()) return;
    if (const int64_t step = ++steps; step % check_every == 0) {
      const trace::Span span("check_every");
      used.check_alike(step);
    }
  }

  std::vector<std::vector<Tensor>> scatter(std::span<const Tensor> inputs) const {
    const PhaseTimer timer(*log, &Phases::scatter);
    auto parts = parallel::scatter(inputs, placement);
    for (const Tensor& input : inputs)
      if (!share_memory(input.device(), first())) log->add_bytes(input.nbytes());
    return parts;
  }

  // Counts what joining copies to or from the first device; gradients take the same way back.
  void count_joined(std::span<const Tensor> parts) const {
    for (const Tensor& y : parts)
      if (y.defined() && y.device() != placement.output_device &&
          (y.device() == first() || placement.output_device == first()))
        log->add_bytes(y.nbytes() * (y.requires_grad() ? 2 : 1));
  }

  // One device alone: the plain module, and the time of its backward.
  std::vector<Tensor> forward_alone(std::span<const Tensor> inputs) {
    const auto used = replicas();
    const PhaseTimer timer(*log, &Phases::forward);
    const RandomStream stream(reproducible() ? own_forward_stream() : RandomStream::current());
    std::vector<Tensor> here;
    for (const Tensor& input : inputs) here.push_back(on_device(input, first()));
    std::vector<Tensor> outputs = used->module().forward_all(here);
    for (Tensor& y : outputs)
      if (y.defined()) y = used->listen(y).to(placement.output_device);
    return outputs;
  }
  template <class Function>
  Tensor loss_alone(const Function& function, const Tensor& x, const Tensor& y) {
    const auto used = replicas();
    const PhaseTimer timer(*log, &Phases::forward);
    const Tensor loss = function(used->module()(on_device(x, first())), on_device(y, first()));
    return used->listen(loss).to(placement.output_device);
  }

  // Calls body(i, output, target) as each replica that has rows; what it returns is replica i's result.
  template <class Body>
  auto run_with_targets(const Tensor& x, const Tensor& y, const Body& body) {
    check(x.dim() > 0 && y.dim() > 0 && y.size(0) == x.size(placement.dim), "DataParallel",
          "the input {} and the target {} have different numbers of rows", x.shape(), y.shape());
    const auto used = replicas();
    const auto inputs = scatter({&x, 1});
    std::vector<int64_t> sizes;
    for (const auto& part : inputs) sizes.push_back(part.empty() ? 0 : part.front().size(placement.dim));
    std::vector<Tensor> targets;
    {
      const PhaseTimer timer(*log, &Phases::scatter);
      targets = parallel::scatter(y, placement.devices, 0, sizes);
    }
    used->refresh();
    std::vector<Tensor> results(inputs.size());
    used->run(inputs.size(), [&](std::size_t i) {
      if (!inputs[i].empty()) results[i] = used->listen(body(i, (*module)(inputs[i].front()), targets[i]));
    });
    check_now_and_then(*used);
    std::erase_if(results, [](const Tensor& t) { return !t.defined(); });
    return results;
  }

  // The loss of all rows from that of each part and its normaliser; their mean where `mean` says so.
  template <class PartOf>
  Tensor combined(bool mean, const Tensor& x, const Tensor& y, const PartOf& part_of) {
    std::vector<Tensor> normalizers(placement.devices.size());
    std::vector<Tensor> sums = run_with_targets(x, y, [&](std::size_t i, const Tensor& output, const Tensor& target) {
      LossParts part = part_of(output, target);
      normalizers[i] = part.normalizer.detach();
      return std::move(part.sum);
    });
    const PhaseTimer timer(*log, &Phases::loss);
    for (Tensor& part : sums) part = on_device(part, placement.output_device);
    Tensor total = sums.size() == 1 ? sums.front() : sum(stack(sums));
    if (!mean) return total;
    std::erase_if(normalizers, [](const Tensor& part) { return !part.defined(); });
    if (std::ranges::any_of(normalizers, [](const Tensor& part) { return part.device().is_cuda(); })) {
      // The host does not wait for them.
      for (Tensor& part : normalizers) part = part.to(placement.output_device).to(float64);
      return mean_of_parts(total, sum(stack(normalizers)));
    }
    double rows = 0;
    for (const Tensor& part : normalizers) rows += part.item<double>();
    return mean_of_parts(total, rows);
  }

  Tensor reproducible_loss(Reduction reduction, const Tensor& x, const Tensor& y, PartOfLoss part_of) {
    const auto used = replicas();
    Tensor loss = parallel::reproducible_loss(
        {.name = "DataParallel", .count = placement.shards, .replicas = used, .output_device = placement.output_device},
        "", reduction, x, y, part_of, [] {}, [](bool) {});
    check_now_and_then(*used);
    return loss;
  }

  // The losses of all rows from those of the parts.
  template <class Losses>
  Tensor joined(const Tensor& x, const Tensor& y, const Losses& losses) {
    const std::vector<Tensor> parts = run_with_targets(
        x, y, [&](std::size_t, const Tensor& output, const Tensor& target) { return losses(output, target); });
    const PhaseTimer timer(*log, &Phases::gather);
    count_joined(parts);
    return parallel::gather(parts, placement.output_device);
  }
};

DataParallel::DataParallel(std::shared_ptr<nn::Module> module, const DataParallelOptions& options) {
  check(module != nullptr, "DataParallel", "the module is empty; make it first, as in std::make_shared<Net>()");
  state_ = std::make_unique<State>(module, options);
  (void)state_->replicas();  // finds out at once what does not fit
  register_wrapped(std::move(module));
}

DataParallel::~DataParallel() = default;

const std::shared_ptr<nn::Module>& DataParallel::module() const { return state_->module; }

const std::vector<Device>& DataParallel::devices() const { return state_->devices; }

Phases DataParallel::phases() const { return state_->log->read(); }

std::string DataParallel::extra() const {
  std::string text;
  for (const Device device : state_->devices) text += (text.empty() ? "devices=[" : ", ") + device.str();
  text += ']';
  if (state_->reproducible())
    text += fmt::format(", reproducible_shards={}", state_->placement.shards);
  else if (const std::size_t count = state_->placement.devices.size(); count != state_->devices.size())
    text += fmt::format(", replicas={}", count);
  if (state_->alone() && state_->first().is_cpu())
    text += " (one device: TANDEM_CPU_DEVICES=k in the environment makes k of the CPU)";
  return text;
}

Tensor DataParallel::forward(const Tensor& x) {
  std::vector<Tensor> outputs = forward_all({&x, 1});
  check(outputs.size() == 1, "DataParallel", "the module returned {} tensors where one is needed; call model({{x}})",
        outputs.size());
  return std::move(outputs.front());
}

std::vector<Tensor> DataParallel::forward_all(std::span<const Tensor> inputs) {
  State& s = *state_;
  if (s.reproducible()) check_no_recorded_forward("DataParallel");
  s.log->restart();
  if (s.alone()) return s.forward_alone(inputs);
  const auto replicas = s.replicas();
  const auto parts = s.scatter(inputs);
  const auto results = parallel_apply(*replicas, parts);
  s.check_now_and_then(*replicas);
  const PhaseTimer timer(*s.log, &Phases::gather);
  for (const auto& result : results) s.count_joined(result);
  return gather(results, s.placement.output_device, s.placement.dim);
}

Tensor DataParallel::loss(const nn::Loss& criterion, const Tensor& x, const Tensor& y) {
  State& s = *state_;
  s.log->restart();
  if (s.reproducible())
    return s.reproducible_loss(criterion.reduction(), x, y, [&](const Tensor& output, const Tensor& target) {
      return criterion.parts(output, target);
    });
  if (s.alone()) return s.loss_alone(criterion, x, y);
  if (criterion.reduction() == Reduction::none) return s.joined(x, y, criterion);
  return s.combined(criterion.reduction() == Reduction::mean, x, y,
                    [&](const Tensor& output, const Tensor& target) { return criterion.parts(output, target); });
}

Tensor DataParallel::loss(FunctionRef<Tensor(const Tensor&, const Tensor&)> function, Reduction reduction,
                          const Tensor& x, const Tensor& y) {
  State& s = *state_;
  s.log->restart();
  if (s.reproducible())
    return s.reproducible_loss(reduction, x, y, [&](const Tensor& output, const Tensor& target) {
      return part_of_loss("DataParallel", function, reduction, output, target);
    });
  if (reduction == Reduction::none) return s.alone() ? s.loss_alone(function, x, y) : s.joined(x, y, function);
  if (s.alone())  // the mean of nothing is no number; no row adds nothing
    return s.loss_alone(
        [&](const Tensor& output, const Tensor& target) {
          return target.dim() > 0 && target.size(0) == 0 ? sum(output) : function(output, target);
        },
        x, y);
  return s.combined(reduction == Reduction::mean, x, y, [&](const Tensor& output, const Tensor& target) {
    return part_of_loss("DataParallel", function, reduction, output, target);
  });
}

}  // namespace tandem::parallel
