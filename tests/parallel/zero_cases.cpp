// Equality with the optimizer alone, the share of each rank, training with DistributedDataParallel, and errors.
#include <unistd.h>

#include <filesystem>

#include <tandem/tests/parallel/zero_cases.h>

namespace tandem::test {
namespace {

using parallel::CommError;

// For each optimizer and type the same bits as alone, in parameters and in the whole state.
void same_bits(const Group& group) {
  const std::vector<std::pair<const char*, MakeOptimizer>> makers = {
      {"SGD", maker<optim::SGD>({.lr = 0.1})},
      {"SGD with momentum", maker<optim::SGD>({.lr = 0.1, .momentum = 0.9, .dampening = 0.1, .weight_decay = 0.01})},
      {"SGD, nesterov", maker<optim::SGD>({.lr = 0.1, .momentum = 0.9, .nesterov = true})},
      {"Adam", maker<optim::Adam>({.lr = 0.01, .weight_decay = 0.1})},
      {"Adam, amsgrad", maker<optim::Adam>({.lr = 0.01, .amsgrad = true})},
      {"AdamW", maker<optim::AdamW>({.lr = 0.01})},
      {"AdamW in groups", [](std::vector<Tensor> p) {
         std::vector<optim::AdamWGroup> groups(2);
         groups[0] = {.params = {p[0], p[1]}, .lr = 0.02};
         groups[1] = {.params = {p.begin() + 2, p.end()}, .weight_decay = 0.0, .amsgrad = true};
         return std::make_unique<optim::AdamW>(groups, optim::AdamWOptions{.lr = 0.01});
       }}};
  for (const auto& [name, make] : makers)
    for (const DType dtype : {float32, float64}) {
      const std::vector<Tensor> a = make_parameters(dtype), b = make_parameters(dtype);
      const auto alone = make(a);
      ZeroRedundancyOptimizer zero(b, make, group);
      for (int step = 0; step < 12; ++step) {
        set_gradients(a, step);
        set_gradients(b, step);
        alone->step();
        zero.step();
        zero.zero_grad();
      }
      require_same_values(a, b, fmt::format("with {} of {}", name, dtype));
      require_same_state(alone->state_dict(), zero.state_dict());
      require_error({fmt::format("gather_state: root {} is out of range", group->size())},
                    [&] { zero.gather_state(group->size()); });
      const NamedTensors whole = zero.gather_state(group->size() - 1);
      if (group->rank() == group->size() - 1)
        require_same_state(alone->state_dict(), whole);
      else
        require(whole.empty(), "the state is on one rank alone");
      for (const Tensor& p : b) require(!p.grad().defined(), "zero_grad makes gradients undefined");
    }
}

// Both types in one optimizer; a parameter that never has a gradient has no state, and stays as it is.
void mixed_types(const Group& group) {
  auto make_mixed = [] {
    std::vector<Tensor> all;
    for (int i = 0; i < 6; ++i) all.push_back(wave({5 + i, 7}, i, i % 2 == 0 ? float32 : float64).requires_grad_());
    return all;
  };
  std::vector<Tensor> a = make_mixed(), b = make_mixed();
  optim::Adam alone(a, {.lr = 0.1});
  auto zero = ZeroRedundancyOptimizer::make<optim::Adam>(b, {.lr = 0.1}, group);
  for (int step = 0; step < 5; ++step) {
    for (auto* all : {&a, &b}) {
      set_gradients(*all, step);
      (*all)[2].set_grad({});
    }
    alone.step();
    zero.step();
  }
  require_same_values(a, b, "of two types");
  require(equal(b[2].detach(), make_mixed()[2].detach()), "a parameter without a gradient stays");
  require_same_state(alone.state_dict(), zero.state_dict());
  zero.set_lr(0.25);
  require(zero.lr() == 0.25 && zero.group_count() == 1 && zero.local().lr() == 0.25, "the learning rate");
}

// A rank has 1/n of the state to within one parameter, and all ranks together have all of it once.
void share_of_state(const Group& group) {
  const auto net = make_mlp(float32);
  const std::vector<Tensor> parameters = net->parameters();
  auto zero = ZeroRedundancyOptimizer::make<optim::Adam>(parameters, {}, group);
  set_gradients(parameters, 1);
  zero.step();
  std::int64_t all = 0, largest = 0, mine = 0;
  for (const Tensor& p : parameters) {
    all += 2 * p.numel();
    largest = std::max(largest, 2 * p.numel());
  }
  for (const auto& [name, t] : zero.local().state_dict())
    if (t.dim() > 0) mine += t.numel();
  require(std::abs(mine - all / group->size()) <= largest, fmt::format("1/{} of {}, not {}", group->size(), all, mine));
  require(mine <= all / group->size() + 2 * 16 * (1 + static_cast<std::int64_t>(parameters.size())),
          "a cache line more for each parameter");
  Tensor sum = full({1}, mine, {.dtype = int64});
  group->all_reduce(sum).wait();
  require(sum.item<std::int64_t>() == all, "each element has a state on one rank");
}

void more_ranks_than_elements(const Group& group) {
  std::vector<Tensor> a{wave({3}, 1).requires_grad_()}, b{wave({3}, 1).requires_grad_()};
  std::vector<Tensor> nothing{empty({0}).requires_grad_()};
  optim::Adam alone(a);
  auto zero = ZeroRedundancyOptimizer::make<optim::Adam>(b, {}, group);
  auto of_nothing = ZeroRedundancyOptimizer::make<optim::Adam>(nothing, {}, group);
  for (int step = 0; step < 3; ++step) {
    set_gradients(a, step);
    set_gradients(b, step);
    set_gradients(nothing, step);
    alone.step();
    zero.step();
    of_nothing.step();
  }
  require_same_values(a, b, "of fewer elements than ranks");
  require_same_state(alone.state_dict(), zero.state_dict());
  zero.load_state_dict(alone.state_dict());
  require_same_state(alone.state_dict(), zero.state_dict());
  require(of_nothing.state_dict().front().second.item<int>() == 3, "steps are counted");
}

struct Trained {
  explicit Trained(const Group& group, bool unused = false) : net(make_mlp(float32)) {
    ddp = std::make_unique<parallel::DistributedDataParallel>(
        net, parallel::DistributedDataParallelOptions{.process_group = group, .find_unused_parameters = unused});
  }
  std::shared_ptr<nn::SequentialImpl> net;
  std::unique_ptr<parallel::DistributedDataParallel> ddp;
};

// As the optimizer alone, with clipping and a schedule; gradients go on being written to their buckets.
void with_ddp(const Group& group) {
  Trained a(group), b(group);
  optim::AdamW alone(a.ddp->parameters(), {.lr = 0.1});
  auto zero = ZeroRedundancyOptimizer::make<optim::AdamW>(b.ddp->parameters(), {.lr = 0.1}, group);
  optim::StepLR schedule(alone, 2, 0.5), schedule_of_zero(zero.local(), 2, 0.5);
  const nn::CrossEntropyLoss loss_fn;
  const void* place = nullptr;
  for (int step = 0; step < 8; ++step) {
    const Tensor x = part(wave({11, 6}, step, float32), group), y = part(labels(11, 4, step), group);
    a.ddp->loss(loss_fn, x, y).backward();
    b.ddp->loss(loss_fn, x, y).backward();
    const void* now = b.net->parameters()[0].grad().raw().data;
    if (step >= 3) require(now == place, "a gradient is written to the same place at each step");
    place = now;
    nn::utils::clip_grad_norm_(a.ddp->parameters(), 0.1);
    nn::utils::clip_grad_norm_(b.ddp->parameters(), 0.1);
    alone.step();
    zero.step();
    alone.zero_grad();
    zero.zero_grad();
    schedule.step();
    schedule_of_zero.step();
  }
  require(zero.lr() == alone.lr() && zero.lr() < 0.01, "the schedule");
  require_same_values(a.net->parameters(), b.net->parameters(), "after training");
  require_same_state(alone.state_dict(), zero.state_dict());
  parallel::check_consistency(*b.net, group);
}

// A layer that no rank uses at first has no gradient, no state, and does not move.
void with_unused_parameters(const Group& group) {
  struct Net : nn::Module {
    Net() { fill(*this); }
    Tensor forward(const Tensor& x) override { return use_b ? b(a(x)) : a(x); }
    nn::Linear a = register_module("a", nn::Linear(6, 6)), b = register_module("b", nn::Linear(6, 6));
    bool use_b = false;
  };
  const auto one = std::make_shared<Net>(), two = std::make_shared<Net>();
  const parallel::DistributedDataParallelOptions options{.process_group = group, .find_unused_parameters = true};
  parallel::DistributedDataParallel ddp_one(one, options), ddp_two(two, options);
  optim::Adam alone(one->parameters(), {.lr = 0.1});
  auto zero = ZeroRedundancyOptimizer::make<optim::Adam>(two->parameters(), {.lr = 0.1}, group);
  for (int step = 0; step < 6; ++step) {
    one->use_b = two->use_b = step % 3 == 2;
    const Tensor x = part(wave({8, 6}, step, float32), group);
    mean(pow(ddp_one(x), 2)).backward();
    mean(pow(ddp_two(x), 2)).backward();
    alone.step();
    zero.step();
    alone.zero_grad();
    zero.zero_grad();
  }
  require_same_values(one->parameters(), two->parameters(), "with unused parameters");
  require_same_state(alone.state_dict(), zero.state_dict());
}

// The first step compares parameters, settings and steps, not the buffers, which differ by design.
void first_step(const Group& group) {
  const bool odd = group->rank() == group->size() - 1 && group->size() > 1;
  Trained t(group);
  auto zero = ZeroRedundancyOptimizer::make<optim::Adam>(t.net->parameters(), {.lr = 0.5}, group);
  auto backward = [&] { mean((*t.ddp)(wave({2, 6}, 1, float32))).backward(); };
  backward();
  const Tensor before = t.net->parameters()[0].detach().clone();
  if (odd) zero.set_lr(0.25);
  if (group->size() > 1) {
    require_error({"the ranks differ: ", "optimizer state 'group.0.lr' is 0.5 on rank 0, but 0.25 on rank"},
                  [&] { zero.step(); });
    require_error({"optimizer state 'group.0.lr': 0.5, where rank", "the same optimizer"}, [&] { zero.state_dict(); });
    require(equal(t.net->parameters()[0].detach(), before), "nothing has changed");
  }
  zero.set_lr(0.5);
  zero.step();
  // After loading, buffers differ between the ranks when the first step of another model compares.
  const NamedTensors state = zero.state_dict();
  Trained again(group);
  auto loaded = ZeroRedundancyOptimizer::make<optim::Adam>(again.net->parameters(), {}, group);
  loaded.load_state_dict(state);
  if (odd) {
    const NoGradGuard no_grad;
    again.net->parameters()[1].detach().fill_(3);
  }
  mean((*again.ddp)(wave({2, 6}, 1, float32))).backward();
  if (group->size() > 1) require_error({"of parameter '0.bias' is ", "but 3 on rank"}, [&] { loaded.step(); });
  if (odd) {
    const NoGradGuard no_grad;
    again.net->parameters()[1].detach().copy_(make_mlp(float32)->parameters()[1].detach());
  }
  loaded.step();
}

// All ranks see that a parameter was updated, also those that own no element of it.
void versions(const Group& group) {
  Tensor w = wave({4, 4}, 1, float32).requires_grad_(), still = wave({4, 4}, 2, float32).requires_grad_();
  auto zero = ZeroRedundancyOptimizer::make<optim::SGD>({w, still}, {.lr = 0.1}, group);
  const Tensor x = wave({4, 4}, 3, float32).requires_grad_();
  const Tensor y = sum(matmul(x, w)), z = sum(matmul(x, still));
  w.set_grad(ones({4, 4}));
  zero.step();
  require_error({"changed"}, [&] { y.backward(); });
  z.backward();  // not updated
}

void errors_of_making(const Group& group) {
  const bool odd = group->rank() == group->size() - 1;
  auto make = [&](const std::vector<Tensor>& parameters, const MakeOptimizer& how) {
    ZeroRedundancyOptimizer zero(parameters, how, group);
  };
  const std::vector<Tensor> good = make_parameters(float32);
  const Tensor place = good[0].detach();
  // Of all ranks alike, and of one alone: the others hear of it.
  auto both = [&](std::initializer_list<std::string> parts, const std::function<void(bool)>& body) {
    require_error(parts, [&] { body(true); });
    if (group->size() == 1) return;
    std::string text = require_error({}, [&] { body(odd); });
    for (const std::string& part : parts) require(text.find(part) != std::string::npos, "'" + part + "' in: " + text);
    if (!odd) require(text.find(fmt::format("rank {} cannot take part", group->size() - 1)) != std::string::npos, text);
    group->barrier().wait();
  };
  auto bad_parameters = [&](const std::string& what, const std::vector<Tensor>& parameters) {
    both({what}, [&](bool bad) { make(bad ? parameters : make_parameters(float32), maker<optim::Adam>()); });
  };
  bad_parameters("parameter 1 is undefined", {good[0], Tensor()});
  bad_parameters("parameter 1 is in the list or in another group already", {good[0], good[0]});
  bad_parameters("parameter 0 was computed by a recorded operation", {good[0] * 2});
  bad_parameters("parameter 0 is int64", {zeros({3}, {.dtype = int64})});
  bad_parameters("is not contiguous", {good[0].detach().t().requires_grad_()});
  bad_parameters("the list of parameters is empty", {});
  both({"lr is -1"}, [&](bool bad) {
    make(good, [&](std::vector<Tensor> p) {
      return std::make_unique<optim::Adam>(std::move(p), optim::AdamOptions{.lr = bad ? -1.0 : 1.0});
    });
  });
  both({"the factory gave no optimizer"}, [&](bool bad) {
    make(good, [&](std::vector<Tensor> p) { return bad ? nullptr : maker<optim::Adam>()(std::move(p)); });
  });
  both({"has not made its optimizer of the 6 slices that it was given"}, [&](bool bad) {
    make(good, [&](std::vector<Tensor> p) {
      if (bad) std::swap(p[0], p[1]);
      return maker<optim::Adam>()(std::move(p));
    });
  });
  both({"has not made its optimizer of the 6 slices"}, [&](bool bad) {
    make(good, [&](std::vector<Tensor> p) { return maker<optim::Adam>()(bad ? good : std::move(p)); });
  });
  require(place.identity()->storage == good[0].identity()->storage, "parameters stay where they are");
  if (group->size() == 1) return;
  auto differs = [&](std::initializer_list<std::string> parts, const std::vector<Tensor>& parameters,
                     const MakeOptimizer& how) {
    const Tensor before = parameters[0].detach();
    const std::string text = require_error(parts, [&] { make(parameters, how); });
    require(text.find("the ranks differ: rank 0 has ") != std::string::npos, text);
    require(before.identity()->storage == parameters[0].identity()->storage, "a parameter stays where it is");
  };
  auto other = [&](const std::vector<Tensor>& theirs) { return odd ? theirs : make_parameters(float32); };
  const std::string advice = "the same optimizer of the same model on every rank";
  differs({"parameter 0: float32 {7, 13}, where rank", "parameter 0: float64 {7, 13}", advice},
          other(make_parameters(float64)), maker<optim::Adam>());
  differs({"parameter 1: float32 {13}, where rank", "parameter 1: float32 {3}"},
          other({wave({7, 13}, 1, float32), wave({3}, 1, float32)}), maker<optim::Adam>());
  differs({"parameter 1: float32 {13}, where rank", "optimizer state 'group.0.lr'"}, other({wave({7, 13}, 1, float32)}),
          maker<optim::Adam>());
  differs({"optimizer: Adam, where rank", "optimizer: AdamW"}, make_parameters(float32),
          odd ? maker<optim::AdamW>() : maker<optim::Adam>());
  differs({"'group.0.beta2': 0.999, where rank", "'group.0.beta2': 0.5"}, make_parameters(float32),
          odd ? maker<optim::Adam>({.betas = {0.9, 0.5}}) : maker<optim::Adam>());
  make(make_parameters(float32), maker<optim::Adam>());  // the group still works
  const auto first = parallel::new_group({0});
  if (group->rank() > 0)
    require_error({"this process is not a member of the group"},
                  [&] { ZeroRedundancyOptimizer zero(good, maker<optim::Adam>(), first); });
  group->barrier().wait();
}

// Without a wrapped model nothing else compares: what differs is named, nothing is changed, and the ranks stay in step.
void differences_at_a_step(const Group& group) {
  if (group->size() == 1) return;
  const bool odd = group->rank() == group->size() - 1;
  std::vector<Tensor> parameters = make_parameters(float32);
  if (odd) parameters[1].detach().fill_(7);
  auto zero = ZeroRedundancyOptimizer::make<optim::Adam>(parameters, {.lr = 0.5}, group);
  set_gradients(parameters, 1);
  require_error({"the ranks differ: ", "parameter 1: values with the hash ", "the same optimizer"},
                [&] { zero.step(); });
  parameters[1].detach().fill_(7);
  zero.step();
  set_gradients(parameters, 2);
  const Tensor before = parameters[0].detach().clone();
  if (odd) zero.set_lr(0.25);
  require_error({"optimizer state 'group.0.lr': 0.5, where rank", "'group.0.lr': 0.25"}, [&] { zero.step(); });
  zero.set_lr(0.5);
  if (odd) parameters[2].set_grad({});
  require_error({"gradient of parameter 2: there, where rank", "gradient of parameter 2: missing"},
                [&] { zero.step(); });
  require(equal(parameters[0].detach(), before), "nothing is changed");
  set_gradients(parameters, 2);
  zero.step();
  // A state of fewer parameters that one rank alone has loaded.
  const NamedTensors state = zero.state_dict();
  NamedTensors less = state;
  std::erase_if(less, [](const auto& entry) { return entry.first.starts_with("1."); });
  zero.load_state_dict(odd ? less : state);
  require_error({"optimizer state '1.step': 2, where rank", "optimizer state '1.step': none"},
                [&] { zero.state_dict(); });
}

// What changes a parameter's place is an error on every rank, and the job goes on without it.
void errors_of_steps(const Group& group) {
  const bool odd = group->rank() == group->size() - 1;
  auto fails = [&](const std::string& what, const std::function<void(Tensor&)>& spoil) {
    std::vector<Tensor> parameters = make_parameters(float32);
    auto zero = ZeroRedundancyOptimizer::make<optim::Adam>(parameters, {}, group);
    set_gradients(parameters, 1);
    const Tensor before = parameters[1].detach().clone();
    if (odd) spoil(parameters[0]);
    const std::string text = require_error({what}, [&] { zero.step(); });
    if (odd)
      require(equal(before, parameters[1].detach()), "nothing is changed where it does not fit");
    else
      require(text.find(fmt::format("rank {} cannot take part in all_gather", group->size() - 1)) != std::string::npos,
              text);
    group->barrier().wait();
  };
  const std::string moved = "parameter 0 was moved, converted or given another shape after the optimizer was made";
  fails(moved, [](Tensor& p) { p.set_data(p.detach().clone()); });
  fails(moved, [](Tensor& p) { p.set_data(p.detach().to(float64)); });
  fails(moved, [](Tensor& p) { p.set_data(p.detach().view({91})); });
  fails(moved, [](Tensor& p) { p.set_data(p.detach().t()); });
  std::vector<Tensor> parameters{wave({3}, 1).to(float32).requires_grad_()};
  parameters[0].set_grad(ones({3}));
  parameters[0].set_data(wave({4}, 1));
  auto zero = ZeroRedundancyOptimizer::make<optim::Adam>(parameters, {}, group);
  require_error({"parameter 0 is float64 {4} on cpu:0, but its gradient is float32 {3} on cpu:0; call zero_grad()"},
                [&] { zero.step(); });
  zero.zero_grad();
  zero.step();
}

// A state that does not fit is an Error that says so, as the optimizer's alone, and changes nothing.
void errors_of_loading(const Group& group) {
  const std::vector<Tensor> parameters = make_parameters(float32);
  auto zero = ZeroRedundancyOptimizer::make<optim::Adam>(parameters, {}, group);
  for (int step = 1; step < 3; ++step) {
    set_gradients(parameters, step);
    zero.step();
  }
  const NamedTensors good = copy_of(zero.state_dict());
  auto refused = [&](std::initializer_list<std::string> parts, const std::function<void(NamedTensors&)>& spoil) {
    NamedTensors state = copy_of(good);
    for (auto& entry : state)
      if (entry.second.dtype() == float32) entry.second.fill_(9);
    spoil(state);
    require(!zero.state_problems(state).empty(), "there is a problem");
    const std::string text = require_error(parts, [&] { zero.load_state_dict(state); });
    require(text.find("[ZeroRedundancyOptimizer] the state does not fit") == 0, text);
    require_same_state(zero.state_dict(), good);
  };
  auto entry = [](NamedTensors& state, const std::string& name) -> std::pair<std::string, Tensor>& {
    return *std::find_if(state.begin(), state.end(), [&](const auto& e) { return e.first == name; });
  };
  refused({"0.exp_avg is float32 {3}, but float32 {7, 13} is needed"},
          [&](NamedTensors& s) { entry(s, "0.exp_avg").second = ones({3}); });
  refused({"1.exp_avg_sq is float64 {13}, but float32 {13} is needed"},
          [&](NamedTensors& s) { entry(s, "1.exp_avg_sq").second = ones({13}, {.dtype = float64}); });
  refused({"0.exp_avg is undefined"}, [&](NamedTensors& s) { entry(s, "0.exp_avg").second = {}; });
  refused({"0.exp_avg is missing"},
          [&](NamedTensors& s) { std::erase_if(s, [](auto& e) { return e.first == "0.exp_avg"; }); });
  refused({"1.step is missing"},
          [&](NamedTensors& s) { std::erase_if(s, [](auto& e) { return e.first == "1.step"; }); });
  refused({"1.step is 0, but at least 1 is needed"},
          [&](NamedTensors& s) { entry(s, "1.step").second = zeros({}, {.dtype = int64}); });
  refused({"0.exp_avg is there twice"}, [&](NamedTensors& s) { s.push_back(entry(s, "0.exp_avg")); });
  refused({"group.0.lr is missing", "0.exp_avg is missing"}, [&](NamedTensors& s) { s.resize(1); });
  for (const std::string name : {"6.exp_avg", "99999999999999999999.exp_avg", "-1.exp_avg", "0", "0.", "00.exp_avg",
                                 "exp_avg", "", "0.max_exp_avg_sq"})
    refused({name + " is not known here"}, [&](NamedTensors& s) { s.emplace_back(name, ones({7, 13})); });
  refused({"group.0.lr is missing", "momentum"}, [&](NamedTensors& s) {
    const std::vector<Tensor> p = make_parameters(float32);
    s = optim::SGD(p, {.momentum = 0.5}).state_dict();
    std::erase_if(s, [](auto& e) { return e.first == "group.0.lr"; });
  });
  require_error({"the state of a ZeroRedundancyOptimizer is divided among the ranks"},
                [&] { parallel::broadcast_state(zero, group); });
  // The state of an optimizer alone, and back.
  const std::vector<Tensor> a = make_parameters(float32);
  optim::Adam alone(a, {.lr = 0.5});
  alone.load_state_dict(good);
  require_same_state(alone.state_dict(), good);
  set_gradients(a, 4);
  alone.step();
  alone.set_lr(0.125);
  zero.load_state_dict(alone.state_dict());
  require(zero.lr() == 0.125, "settings are loaded");
  require_same_state(zero.state_dict(), alone.state_dict());
}

// One rank alone that asks for the state meets another call of the others, also one of the same kind and size.
void state_of_one_rank(const Group& group) {
  if (group->size() == 1) return;
  const std::vector<Tensor> parameters = make_parameters(float32);
  auto zero = ZeroRedundancyOptimizer::make<optim::Adam>(parameters, {}, group);
  const std::string path =
      (std::filesystem::temp_directory_path() / fmt::format("tandem_{}_{}", getpid(), group->rank())).string();
  Tensor other = ones({5});
  const std::string of_state =
      "(part of ZeroRedundancyOptimizer::state_dict (save and load call it), which every rank must call)";
  auto alone = [&](const std::string& what, const auto& body) {
    require_error({"the ranks disagree: ", what}, [&] {
      if (group->rank() == 0) body();
      group->all_reduce(other).wait();
    });
  };
  alone(of_state, [&] { save(path, {zero}); });
  const std::vector<Tensor> trained = make_parameters(float32);
  optim::Adam whole(trained);
  set_gradients(trained, 0);
  whole.step();
  save(path, {whole});
  alone(of_state, [&] { load(path, {zero}, {.strict = false}); });
  if (group->rank() == 0) load(path, {zero});
  std::filesystem::remove(path);
  for (const auto& call : std::initializer_list<void (*)(ZeroRedundancyOptimizer&)>{
           [](ZeroRedundancyOptimizer& z) { z.step(); }, [](ZeroRedundancyOptimizer& z) { (void)z.state_dict(); }})
    require_error({"the ranks differ: ", "optimizer state '0.step': 1", "optimizer state '0.step': none",
                   "load and step the same optimizer of the same model on every rank"},
                  [&] { call(zero); });
  zero.load_state_dict(optim::Adam(trained).state_dict());
  alone("(part of ZeroRedundancyOptimizer::gather_state, which every rank must call)", [&] { zero.gather_state(0); });
  alone("(part of save_checkpoint, which every rank must call)",
        [&] { parallel::save_checkpoint(path, {zero}, group); });
  alone("(part of load_checkpoint, which every rank must call)",
        [&] { parallel::load_checkpoint(path, {zero}, {}, group); });
  alone("(part of the making of a ZeroRedundancyOptimizer, which every rank must call)",
        [&] { (void)ZeroRedundancyOptimizer::make<optim::Adam>(make_parameters(float32), {}, group); });
  require_error({"the ranks disagree: ", of_state, "(part of ZeroRedundancyOptimizer::step, which every"}, [&] {
    if (group->rank() == 0) zero.state_dict();
    zero.step();
  });
  group->barrier().wait();
}

}  // namespace

std::vector<DdpCase> zero_cases() {
  return {{"zero: same bits", same_bits},
          {"zero: types", mixed_types},
          {"zero: share", share_of_state},
          {"zero: more ranks than elements", more_ranks_than_elements},
          {"zero: DistributedDataParallel", with_ddp},
          {"zero: unused parameters", with_unused_parameters},
          {"zero: first step", first_step},
          {"zero: versions", versions},
          {"zero: errors of making", errors_of_making},
          {"zero: differences at a step", differences_at_a_step},
          {"zero: errors of steps", errors_of_steps},
          {"zero: errors of loading", errors_of_loading},
          {"zero: state of one rank", state_of_one_rank}};
}

}  // namespace tandem::test
