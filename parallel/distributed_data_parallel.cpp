#include <tandem/parallel/distributed_data_parallel.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include <tandem/autograd/grad_mode.h>
#include <tandem/autograd/node.h>
#include <tandem/parallel/backward_end.h>
#include <tandem/parallel/consistency.h>
#include <tandem/parallel/contents.h>
#include <tandem/parallel/data_parallel.h>
#include <tandem/parallel/joinable.h>
#include <tandem/parallel/loss_exchange.h>
#include <tandem/parallel/replicas.h>
#include <tandem/parallel/reproducible.h>
#include <tandem/parallel/unused_parameters.h>
#include <tandem/tensor/capture.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/random.h>
#include <tandem/tensor/trace.h>

namespace tandem::parallel {
namespace {

constexpr const char* kName = "DistributedDataParallel";

std::int64_t bytes_of_mb(const char* option, double mb) {
  constexpr double kMost = 1 << 20;
  check(mb > 0 && mb <= kMost, kName, "{} is {}; give a number of MiB above 0 and at most {}", option, mb, kMost);
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(mb * (1 << 20)));
}

}  // namespace

// Shared with the graph: a backward may come after the wrapper is gone.
struct DistributedDataParallel::State final : BackwardListener, Joinable {
  // A parameter as it was wrapped.
  struct Wrapped {
    std::string name;
    Tensor tensor;
    Shape shape;
    DType dtype;
    Device device;
    bool requires_grad;
  };

  std::shared_ptr<nn::Module> module;
  std::shared_ptr<ProcessGroup> group;
  bool broadcast_buffers = true, find_unused = false;
  std::vector<Wrapped> wrapped;
  std::optional<Reducer> reducer;
  std::optional<UnusedParameters> unused;
  std::optional<Shards> shards;  // with reproducible_shards, in place of the reducer
  bool synchronised = true;      // of the forwards to come: see NoSync
  bool refused = false;          // the last begin has failed, and its backward was not abandoned yet
  double forward_seconds = 0;
  std::int64_t check_every = 0, steps = 0;  // synchronised forwards so far

  // In a join.
  bool of_all_rows = false;    // a backward since the last average went through a result of loss
  bool keeps_average = false;  // gradients have in them the last average: every rank has its share of that
  double scale = 1;            // of the averages of this backward

  // Where the ranks' sums are: the GPU of the model, or the CPU.
  Device home() const { return wrapped.front().device.is_cuda() ? wrapped.front().device : Device(); }

  // What the ranks do together, in a join.
  enum Call { kBuffers, kLoss, kBackward, kBackwardOfAllRows, kFirstStep, kGuard };
  std::string name_of(int call) const override {
    constexpr const char* kNames[] = {
        "the broadcast of buffers", "the exchange of loss",           "a backward",
        "a backward of loss",       "the first step of an optimizer", "the comparison of check_every"};
    return fmt::format("{} of a DistributedDataParallel", kNames[call]);
  }

  // What the gradients are before a backward changes them.
  enum Detail { kHasGradients = 1, kKeepsAverage = 2 };
  int look_at_gradients() {
    bool some = false, untouched = false;
    for (std::size_t i = 0; i < reducer->size(); ++i) {
      if (!reducer->parameter(i).grad().defined()) continue;
      some = true;
      untouched = untouched || !reducer->touched(i);
    }
    keeps_average = untouched || (some && keeps_average);
    return (some ? kHasGradients : 0) + (keeps_average ? kKeepsAverage : 0);
  }

  int announce_backward() {
    if (!joining()) return 0;
    const bool exact = std::exchange(of_all_rows, false);
    const Participants who = announce(exact ? kBackwardOfAllRows : kBackward, look_at_gradients());
    scale = exact ? 1 : who.scale;
    return who.lowest;
  }

  void begin() override {
    refused = true;
    scale = 1;
    reducer->begin([this] { return announce_backward(); });
    refused = false;
    if (unused) unused->begin();
  }

  // The rest of a backward, once no gradient will come any more.
  void average(bool zeros) {
    std::exception_ptr error;
    if (unused) {
      error = unused->end(scale);
    } else {
      reducer->launch_rest(zeros);
      error = reducer->wait(scale);
    }
    if (error) std::rethrow_exception(error);
  }

  void end() override { average(false); }

  // A backward of others, on a rank that has no rows.
  void shadow_backward(bool exact, const Participants& who) {
    reducer->begin([&] { return who.lowest; });
    scale = exact ? 1 : who.scale;
    const bool keeps = (who.detail & kKeepsAverage) != 0;
    if (unused) unused->begin_without_batch(keeps);
    // Where the others add to an average, this rank has its share of that; where they add to gradients of no_sync, it
    // may have such, too. But with a scale the others are all that count.
    for (std::size_t i = 0; i < reducer->size(); ++i)
      if (scale != 1 || who.detail == 0 || !(keeps || reducer->touched(i))) Tensor(reducer->parameter(i)).set_grad({});
    average(true);
    for (std::size_t i = 0; i < reducer->size(); ++i)
      if (!unused) Tensor(reducer->parameter(i)).set_grad(reducer->view(i));
  }

  void shadow(int call, const Participants& who) override {
    const NoGradGuard no_grad;
    if (call == kBuffers) {
      broadcast_tensors(module->buffers(), who.lowest, *group);
    } else if (call == kLoss) {
      LossExchange(group, zeros({}, {.dtype = float64}), home(), "", who.ended).wait();
    } else if (call == kFirstStep) {
      check_before_first_step(*module, nullptr, *group, who.ended);
    } else if (call == kGuard) {
      check_divergence(*module, *group, steps, who.ended);
    } else {
      shadow_backward(call == kBackwardOfAllRows, who);
    }
  }

  void take_over(int root, bool ended) override {
    const NoGradGuard no_grad;
    std::vector<Tensor> all = module->parameters();
    if (broadcast_buffers)
      for (Tensor& b : module->buffers()) all.push_back(b);
    broadcast_tensors(all, root, *group);
    // For each parameter whether its gradient is an average that is kept, and whether its first step is still to come;
    // and the steps.
    (void)look_at_gradients();
    Tensor left = zeros({static_cast<std::int64_t>(reducer->size()) * 2 + 1}, {.dtype = int64});
    auto* said = left.data<std::int64_t>();
    for (std::size_t i = 0; i < reducer->size(); ++i) {
      said[2 * i] = reducer->parameter(i).grad().defined() && (keeps_average || !reducer->touched(i));
      said[2 * i + 1] = autograd::ensure_meta(reducer->parameter(i)).before_first_step != nullptr;
    }
    said[2 * reducer->size()] = steps;
    group->broadcast(left, root).wait();
    if (!ended) return;
    said = left.data<std::int64_t>();
    for (std::size_t i = 0; i < reducer->size(); ++i) {
      if (said[2 * i] == 0) Tensor(reducer->parameter(i)).set_grad({});
      if (said[2 * i + 1] == 0) autograd::ensure_meta(reducer->parameter(i)).before_first_step = nullptr;
    }
    steps = said[2 * reducer->size()];
  }

  void abandon() override {
    if (std::exchange(refused, false)) return;  // the reducer may be armed for the backward around this one
    const std::string reason =
        fmt::format("rank {} of {}: its backward ended with an error", group->rank(), group->size());
    if (unused) return unused->abandon(reason);
    reducer->fail_rest(reason);
    (void)reducer->wait();  // the backward's own error is on its way
  }

  void check_unchanged() const {
    const NamedTensors now = module->named_parameters();
    auto changed = [&](const std::string& name, const std::string& how) {
      fail(kName,
           "rank {} of {}: parameter '{}' was {} after the model was wrapped; change a model before it is wrapped, or "
           "wrap it again",
           group->rank(), group->size(), name, how);
    };
    for (std::size_t i = 0; i < std::max(now.size(), wrapped.size()); ++i) {
      if (i == wrapped.size() || (i < now.size() && now[i].second.identity() != wrapped[i].tensor.identity()))
        changed(now[i].first, "added");
      const Wrapped& w = wrapped[i];
      const Tensor& p = w.tensor;
      if (p.requires_grad() != w.requires_grad) changed(w.name, w.requires_grad ? "frozen" : "unfrozen");
      if (p.dtype() != w.dtype) changed(w.name, fmt::format("converted from {} to {}", w.dtype, p.dtype()));
      if (p.device() != w.device) changed(w.name, fmt::format("moved from {} to {}", w.device, p.device()));
      if (p.shape() != w.shape) changed(w.name, fmt::format("changed from shape {} to {}", w.shape, p.shape()));
    }
  }

  void send_buffers() const {
    const std::vector<Tensor> buffers = module->buffers();
    if (buffers.empty()) return;
    const trace::Span span("broadcast buffers");
    broadcast_tensors(buffers, announce(kBuffers).lowest, *group);
  }

  // With reproducible_shards: this rank's parts are replicas on its device.
  void make_shards(const DistributedDataParallelOptions& options) {
    check_shards(kName, options.reproducible_shards, group->size(), "ranks");
    check(group->backend() != "nccl" || wrapped.front().device.is_cpu(), kName,
          "reproducible_shards does not work over nccl, which adds in an order of its own; train on the CPU");
    check(broadcast_buffers, kName, "reproducible_shards needs broadcast_buffers: the buffers are those of one part");
    for (const Wrapped& w : wrapped)
      check(w.device == wrapped.front().device, kName,
            "with reproducible_shards a model is on one device, but '{}' is on {} and '{}' on {}", wrapped.front().name,
            wrapped.front().device, w.name, w.device);
    shards = {
        .name = kName, .count = options.reproducible_shards, .group = group, .output_device = wrapped.front().device};
    bind_shards();
  }

  // All ranks do this together, and make their buckets.
  void bind_shards() {
    const GradModeGuard recording(true);
    const auto here = static_cast<std::size_t>(shards->count / group->size());
    shards->replicas = std::make_shared<Replicas>(module, std::vector<Device>(here, shards->output_device), nullptr,
                                                  FixedSums{.on = true, .group = group, .find_unused = find_unused});
    shards->replicas->refresh();
  }

  void check_no_join(bool join) const {
    check(!shards || !join, kName,
          "join is not for reproducible_shards, whose batches are those of all ranks together; give each rank equally "
          "many");
  }

  Tensor reproducible_loss(const std::string& criterion, Reduction reduction, const Tensor& x, const Tensor& y,
                           PartOfLoss part_of) {
    check_no_join(Joinable::joining(*group));
    const trace::Span span("forward");
    const auto start = std::chrono::steady_clock::now();
    Tensor loss = parallel::reproducible_loss(
        *shards, criterion, reduction, x, y, part_of, [&] { check_unchanged(); },
        [&](bool stale) {
          if (stale) bind_shards();
          if (grad_enabled() && check_every > 0 && ++steps % check_every == 0) check_divergence(*module, *group, steps);
        });
    forward_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return loss;
  }

  // Runs the module as this rank; `run` returns what it computes.
  template <class Run>
  auto forward(const Run& run) {
    check(ReplicaScope::owner() == nullptr, kName,
          "was called inside a replica of a DataParallel; a process works on one device: use one of the two");
    if (shards) check_no_recorded_forward(kName);
    const trace::Span span("forward");
    const auto start = std::chrono::steady_clock::now();
    if (grad_enabled()) {
      check(!synchronised || check_every == 0 || !cuda::capturing(), kName,
            "rank {} of {}: the comparisons of check_every are made on the host, and a cuda::Graph would replay none; "
            "wrap the model without it, and call check_consistency now and then, between replays",
            group->rank(), group->size());
      check(!synchronised || !find_unused || !cuda::capturing(), kName,
            "rank {} of {}: find_unused_parameters asks the host what each step uses, and a cuda::Graph replays one "
            "step; "
            "wrap a model that uses all its parameters, without it",
            group->rank(), group->size());
      check_unchanged();
      if (synchronised && broadcast_buffers && module->is_training()) send_buffers();
      if (synchronised && check_every > 0 && ++steps % check_every == 0) {
        const trace::Span guard_span("check_every");
        check_divergence(*module, *group, steps, announce(kGuard).ended);
      }
    }
    const trace::DeviceSpan device_span("forward", wrapped.front().device);
    // With shards the ranks stay alike: what follows in their own streams is not shifted, and all have one state.
    const RandomStream stream(shards ? own_forward_stream() : group->rank());
    auto result = run(*module);
    forward_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return result;
  }

  // Makes backwards through the outputs synchronise, unless the forward was under no_sync.
  void attach(std::span<Tensor> outputs, const std::shared_ptr<State>& self, bool exact = false) {
    if (!grad_enabled()) return;
    const auto noted = joining() && (exact || !synchronised) ? std::make_shared<Note>(self, exact) : nullptr;
    for (Tensor& y : outputs) {
      if (synchronised) y = listen("distributed_data_parallel", y, self);
      if (noted) y = listen("distributed_data_parallel_join", y, noted);
    }
  }

  // In a join: sees a backward before it changes gradients.
  struct Note final : BackwardListener {
    Note(std::shared_ptr<State> seen_by, bool of_loss) : state(std::move(seen_by)), exact(of_loss) {}
    void begin() override {
      state->look_at_gradients();
      state->of_all_rows = state->of_all_rows || exact;
    }
    void end() override {}
    std::shared_ptr<State> state;
    bool exact;
  };

  // The loss of all rows, as this rank's share. `normalizer` may be undefined until `parts` has given it.
  Tensor loss(const std::string& criterion, Reduction reduction, const Tensor& x, const Tensor& normalizer,
              FunctionRef<LossParts(const Tensor&)> parts, const std::shared_ptr<State>& self) {
    check(reduction != Reduction::none, kName,
          "loss needs one number for all rows; for Reduction::none compute criterion(model(x), y) and reduce it");
    const bool mean = reduction == Reduction::mean, known = mean && normalizer.defined();
    std::optional<LossExchange> exchange;
    const auto tell = [&](const Tensor& own) {
      exchange.emplace(group, own, home(), criterion, announce(kLoss).ended);
    };
    if (known) tell(normalizer.detach());
    LossParts own = forward([&](nn::Module& m) { return parts(m(x)); });
    if (mean && !known) tell(own.normalizer.detach());
    Tensor divisor;  // of a mean
    if (mean) {
      const trace::Span span("wait for normalizer");
      divisor = exchange->wait();
    }
    // The average over the ranks makes it the quotient of all rows' sum and normaliser.
    Tensor result = !mean                        ? mean_of_parts(own.sum, 1.0 / group->size())
                    : divisor.device().is_cuda() ? mean_of_parts(own.sum, divisor) * static_cast<double>(group->size())
                                                 : mean_of_parts(own.sum, divisor.item<double>() / group->size());
    attach({&result, 1}, self, true);
    return result;
  }
};

DistributedDataParallel::DistributedDataParallel(std::shared_ptr<nn::Module> module,
                                                 const DistributedDataParallelOptions& options)
    : state_(std::make_shared<State>()) {
  State& s = *state_;
  check(module != nullptr, kName, "the module is empty; make it first, as in std::make_shared<Net>()");
  for (const nn::Module* part : module->modules())
    check(dynamic_cast<const DistributedDataParallel*>(part) == nullptr, kName,
          "the module contains a DistributedDataParallel already; wrap the whole model once");
  for (const nn::Module* part : module->modules())
    check(dynamic_cast<const DataParallel*>(part) == nullptr, kName,
          "the module contains a DataParallel; a process works on one device: start more processes instead");
  check(options.device_ids.size() <= 1, kName, "device_ids has {} entries; a process works on one device",
        options.device_ids.size());
  check(options.check_every >= 0, kName, "check_every is {}; give a number of steps, or 0 for never",
        options.check_every);
  const std::vector<std::int64_t> caps = {bytes_of_mb("first_bucket_mb", options.first_bucket_mb),
                                          bytes_of_mb("bucket_cap_mb", options.bucket_cap_mb)};
  s.module = module;
  s.group = or_default(options.process_group);
  s.broadcast_buffers = options.broadcast_buffers;
  s.find_unused = options.find_unused_parameters;
  s.check_every = options.check_every;
  check(s.group->rank() >= 0, kName, "this process is not a member of the group; only its members wrap the model");
  check(!Joinable::joining(*s.group), kName, "rank {} of {}: a model is wrapped in a join; wrap it before the join",
        s.group->rank(), s.group->size());
  const Purpose purpose("the wrapping by DistributedDataParallel");
  NamedTensors trained;
  const std::pair<std::string, Tensor>* on_gpu = nullptr;
  const NamedTensors parameters = module->named_parameters();
  for (const auto& parameter : parameters) {
    if (!parameter.second.device().is_cuda()) continue;
    if (on_gpu == nullptr) on_gpu = &parameter;
    check(parameter.second.device() == on_gpu->second.device(), kName,
          "'{}' is on {} and '{}' on {}; a process works on one GPU: move the model there, and start more processes "
          "instead",
          on_gpu->first, on_gpu->second.device(), parameter.first, parameter.second.device());
  }
  for (const auto& [name, p] : parameters) {
    if (p.requires_grad()) trained.emplace_back(name, p);
    s.wrapped.push_back({name, p, p.shape(), p.dtype(), p.device(), p.requires_grad()});
    for (const DeviceId& id : options.device_ids)
      check(id.resolve(p.device().type()) == p.device(), kName, "'{}' is on {}, but device_ids says {}", name,
            p.device(), id.resolve(p.device().type()));
    check(s.group->serves(p.device()), kName,
          "'{}' is on {}, but the ranks work together over {}, which serves tensors of the CPU; leave out the backend, "
          "or give \"nccl\"",
          name, p.device(), s.group->backend());
  }
  check(!trained.empty(), kName, "no parameter requires grad, so there is nothing to average; use the module itself");
  verify_structure(*module, *s.group,
                   {{"device", on_gpu != nullptr ? "a GPU" : "the CPU"},
                    {"bucket_cap_mb", fmt::format("{}", options.bucket_cap_mb)},
                    {"find_unused_parameters", fmt::format("{}", options.find_unused_parameters)},
                    {"broadcast_buffers", fmt::format("{}", options.broadcast_buffers)},
                    {"reproducible_shards", fmt::format("{}", options.reproducible_shards)},
                    {"first_bucket_mb", fmt::format("{}", options.first_bucket_mb)},
                    {"check_every", fmt::format("{}", options.check_every)}});
  std::vector<Tensor> all = module->parameters();
  for (Tensor& b : module->buffers()) all.push_back(b);
  broadcast_tensors(all, 0, *s.group);
  if (options.reproducible_shards != 0)
    s.make_shards(options);
  else
    s.reducer.emplace(trained, s.group, caps, !options.find_unused_parameters);
  if (s.reducer && options.find_unused_parameters) s.unused.emplace(*s.reducer, s.group);
  // An optimizer's first step finds what would let the ranks drift apart.
  const auto hook = std::make_shared<const autograd::StepHook>([weak = std::weak_ptr(state_)](const Stateful& o) {
    if (const auto state = weak.lock())
      check_before_first_step(*state->module, &o, *state->group, state->announce(State::kFirstStep).ended);
  });
  for (const auto& entry : trained) autograd::ensure_meta(entry.second).before_first_step = hook;
  if (!s.shards) s.enroll(*s.group);
  register_wrapped(std::move(module));
}

DistributedDataParallel::~DistributedDataParallel() = default;

Tensor DistributedDataParallel::forward(const Tensor& x) {
  Tensor y = state_->forward([&](nn::Module& m) { return m(x); });
  state_->attach({&y, 1}, state_);
  return y;
}

std::vector<Tensor> DistributedDataParallel::forward_all(std::span<const Tensor> inputs) {
  std::vector<Tensor> outputs = state_->forward([&](nn::Module& m) { return m.forward_all(inputs); });
  state_->attach(outputs, state_);
  return outputs;
}

Tensor DistributedDataParallel::loss(const nn::Loss& criterion, const Tensor& x, const Tensor& y) {
  if (state_->shards)
    return state_->reproducible_loss(
        criterion.str(), criterion.reduction(), x, y,
        [&](const Tensor& output, const Tensor& target) { return criterion.parts(output, target); });
  return state_->loss(
      criterion.str(), criterion.reduction(), x, criterion.normalizer(y),
      [&](const Tensor& output) { return criterion.parts(output, y); }, state_);
}

Tensor DistributedDataParallel::loss(FunctionRef<Tensor(const Tensor&, const Tensor&)> function, Reduction reduction,
                                     const Tensor& x, const Tensor& y) {
  if (state_->shards)
    return state_->reproducible_loss(function_with(reduction), reduction, x, y,
                                     [&](const Tensor& output, const Tensor& target) {
                                       return part_of_loss(kName, function, reduction, output, target);
                                     });
  check(y.dim() > 0, kName, "the target is a single number; loss needs one row for each of the input's");
  const Tensor normalizer = full({}, static_cast<double>(y.size(0)), {.dtype = float64});
  return state_->loss(
      function_with(reduction), reduction, x, normalizer,
      [&](const Tensor& output) { return part_of_loss(kName, function, reduction, output, y); }, state_);
}

void DistributedDataParallel::register_comm_hook(CommHook hook) {
  check(!state_->shards, kName, "a communication hook is not for reproducible_shards, whose sums have one order");
  check(static_cast<bool>(hook.run), kName, "the communication hook '{}' is empty; give it a function", hook.name);
  state_->reducer->set_hook(std::move(hook));
}

DistributedDataParallel::NoSync::NoSync(std::shared_ptr<State> state)
    : state_(std::move(state)), before_(std::exchange(state_->synchronised, false)) {}
DistributedDataParallel::NoSync::~NoSync() { state_->synchronised = before_; }
DistributedDataParallel::NoSync DistributedDataParallel::no_sync() {
  check(!state_->shards, kName,
        "no_sync is not for reproducible_shards, whose backwards end with the sum over all parts; leave it out: "
        "gradients of several backwards add up all the same");
  return NoSync(state_);
}

int DistributedDataParallel::join(FunctionRef<void()> body, const JoinOptions& options) {
  state_->check_no_join(true);
  return parallel::join(body, options, state_->group);
}

LoggingData DistributedDataParallel::logging_data() const {
  LoggingData data;
  data.forward = state_->forward_seconds;
  if (state_->shards) return data;
  const Reducer& r = *state_->reducer;
  const Reducer::Times times = r.times();
  return {.buckets = r.plan(),
          .rebuilt = r.rebuilt(),
          .arrival_order = r.arrival_order(),
          .forward = state_->forward_seconds,
          .backward = times.backward,
          .communication = times.communication,
          .overlap = times.overlap,
          .exposed = times.exposed};
}

const std::shared_ptr<nn::Module>& DistributedDataParallel::module() const { return state_->module; }

std::string DistributedDataParallel::extra() const {
  std::string text = fmt::format("ranks={}, backend={}", state_->group->size(), state_->group->backend());
  if (state_->shards) text += fmt::format(", reproducible_shards={}", state_->shards->count);
  return text;
}

}  // namespace tandem::parallel
