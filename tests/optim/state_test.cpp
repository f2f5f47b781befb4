// State of optimizers: what is saved, going on exactly after a load, and states that do not fit.
#include <algorithm>
#include <memory>

#include <tandem/tests/optim/support.h>

using namespace tandem;
using namespace tandem::test;
using namespace tandem::optim;

namespace {

std::vector<std::string> names_of(const NamedTensors& state) {
  std::vector<std::string> names;
  for (const auto& item : state) names.push_back(item.first);
  return names;
}

NamedTensors without(NamedTensors state, const std::string& name) {
  std::erase_if(state, [&](const auto& item) { return item.first == name; });
  return state;
}

NamedTensors with(NamedTensors state, const std::string& name, const Tensor& value) {
  for (auto& item : state)
    if (item.first == name) item.second = value;
  return state;
}

/// Runs `make` for 10 steps, and 5 + 5 with the state carried over to what `make_other` makes: the same bits.
template <class Make, class MakeOther>
void check_resume(Make make, MakeOther make_other, DType dtype) {
  const std::vector<double> a{0.5, -1.25, 2.0}, b{1, 2, 3, 4, 5};
  std::vector<Tensor> straight{leaf(a, dtype), leaf(b, dtype)}, first{leaf(a, dtype), leaf(b, dtype)};
  const auto whole = make(straight);
  run_steps(*whole, 0, 10);
  const auto before = make(first);
  run_steps(*before, 0, 5);
  const NamedTensors state = copy_of(before->state_dict());
  std::vector<Tensor> second{first[0].detach().clone().requires_grad_(), first[1].detach().clone().requires_grad_()};
  const auto after = make_other(second);
  CHECK(after->state_problems(state).empty());
  after->load_state_dict(state);
  CHECK(same_state(after->state_dict(), state));
  run_steps(*after, 5, 10);
  CHECK(equal(second[0], straight[0]));
  CHECK(equal(second[1], straight[1]));
  CHECK(same_state(after->state_dict(), whole->state_dict()));
}

template <class Method, class Options>
auto maker(Options options) {
  return [options](const std::vector<Tensor>& p) { return std::make_unique<Method>(p, options); };
}

}  // namespace

TEST_CASE("the state's names and types") {
  Tensor p = leaf({1, 2}, float32), q = leaf({1}, float32);
  Adam adam({p, q}, {.amsgrad = true});
  CHECK(adam.state_name() == "optimizer");
  const std::vector<std::string> group{"group.0.lr",           "group.0.beta1",   "group.0.beta2",     "group.0.eps",
                                       "group.0.weight_decay", "group.0.amsgrad", "group.0.parameters"};
  CHECK(names_of(adam.state_dict()) == group);
  set_gradient(q, {1});
  adam.step();
  std::vector<std::string> all{"1.step", "1.exp_avg", "1.exp_avg_sq", "1.max_exp_avg_sq"};
  all.insert(all.end(), group.begin(), group.end());
  const NamedTensors state = adam.state_dict();
  CHECK(names_of(state) == all);
  CHECK(entry(state, "1.step").dtype() == int64);
  CHECK(entry(state, "1.exp_avg").dtype() == float32);
  CHECK(entry(state, "1.exp_avg").shape() == Shape{1});
  CHECK(entry(state, "group.0.lr").dtype() == float64);
  CHECK(entry(state, "group.0.lr").numel() == 1);

  SGD sgd({{.params = {p}}, {.params = {q}, .momentum = 0.9}});
  set_gradient(p, {1, 1});
  sgd.step();
  const std::vector<std::string> names = names_of(sgd.state_dict());
  CHECK(std::vector(names.begin(), names.begin() + 3) ==
        std::vector<std::string>{"0.step", "1.step", "1.momentum_buffer"});
}

// tenstorrent/tt-metal#53212, TrenTorch/TrenTorch PR#187
TEST_CASE("5 steps, save, load and 5 steps equal 10 straight steps bit for bit, whatever the new one was made with") {
  for (const DType dtype : {float32, float64}) {
    const auto sgd = maker<SGD>(SGDOptions{.lr = 0.05, .momentum = 0.8, .weight_decay = 0.1, .nesterov = true});
    check_resume(sgd, sgd, dtype);
    check_resume(sgd, maker<SGD>(SGDOptions{}), dtype);
    check_resume(maker<SGD>(SGDOptions{.lr = 0.05}), sgd, dtype);
    const auto adam =
        maker<Adam>(AdamOptions{.lr = 0.05, .betas = {0.5, 0.7}, .eps = 1e-4, .weight_decay = 0.1, .amsgrad = true});
    check_resume(adam, adam, dtype);
    check_resume(adam, maker<Adam>(AdamOptions{}), dtype);
    check_resume(maker<Adam>(AdamOptions{.lr = 0.05}), adam, dtype);
    check_resume(maker<AdamW>(AdamWOptions{.lr = 0.05, .betas = {0.5, 0.7}}), maker<AdamW>(AdamWOptions{}), dtype);
  }
}

TEST_CASE("loading replaces state that is there, and shares no memory with what was loaded") {
  Tensor p = leaf({1, 2}), q = leaf({1, 2}), other = leaf({5, 5});
  Adam source({p, q}), target({other, leaf({7, 7})});
  set_gradient(p, {1, 1});
  source.step();
  run_steps(target, 0, 3);
  target.load_state_dict(source.state_dict());
  CHECK(same_state(target.state_dict(), source.state_dict()));
  CHECK(!entry(target.state_dict(), "1.step").defined());
  const NamedTensors before = copy_of(source.state_dict());
  run_steps(target, 0, 1);
  CHECK(same_state(source.state_dict(), before));
  source.load_state_dict(source.state_dict());
  CHECK(same_state(source.state_dict(), before));
}

TEST_CASE("loaded state goes to the device of its parameter") {
  set_cpu_device_count(2);
  Tensor p = leaf({1, 2}), there = leaf({1, 2}, float64, "cpu:1");
  SGD source({p}, {.momentum = 0.9}), target({there});
  run_steps(source, 0, 2);
  target.load_state_dict(source.state_dict());
  CHECK(entry(target.state_dict(), "0.momentum_buffer").device() == Device("cpu:1"));
  there.set_data(p.detach().to("cpu:1"));
  run_steps(source, 2, 4);
  run_steps(target, 2, 4);
  CHECK(there.to_vector<double>() == p.to_vector<double>());
  set_cpu_device_count(1);
}

TEST_CASE("a state that does not fit is refused with all its problems, and nothing changes") {
  Tensor p = leaf({1, 2}), q = leaf({1});
  Adam adam({p, q}, {.lr = 0.1});
  run_steps(adam, 0, 2);
  const NamedTensors good = copy_of(adam.state_dict());

  const auto refused = [&](const NamedTensors& state, std::initializer_list<const char*> parts) {
    const std::string text = error_of([&] { adam.load_state_dict(state); });
    INFO(text);
    CHECK(contains(text, "[Adam] the state does not fit; load one that was saved from an optimizer of this kind"));
    for (const char* part : parts) {
      INFO(part);
      CHECK(contains(text, part));
    }
    CHECK(adam.state_problems(state).size() >= parts.size());
    CHECK(same_state(adam.state_dict(), good));
  };
  refused(without(without(good, "0.exp_avg"), "1.step"), {"0.exp_avg is missing", "1.step is missing"});
  refused(with(good, "0.exp_avg_sq", zeros({3}, {.dtype = float64})),
          {"0.exp_avg_sq is float64 {3}, but float64 {2} is needed"});
  refused(with(good, "0.exp_avg_sq", zeros({2})), {"0.exp_avg_sq is float32 {2}, but float64 {2} is needed"});
  refused(with(good, "0.exp_avg", Tensor()), {"0.exp_avg is undefined", "0.exp_avg is missing"});
  refused(with(good, "0.step", tensor(0)), {"0.step is 0, but at least 1 is needed"});
  refused(with(good, "0.step", tensor({1, 2})), {"0.step is int64 {2}, but int64 {} is needed"});
  refused(with(good, "group.0.lr", full({}, -1.0, {.dtype = float64})), {"group.0: lr is -1"});
  refused(with(good, "group.0.beta2", full({}, 1.0, {.dtype = float64})), {"group.0: betas are 0.9 and 1"});
  refused(with(good, "group.0.amsgrad", full({}, 1.0, {.dtype = float64})),
          {"0.max_exp_avg_sq is missing", "1.max_exp_avg_sq is missing"});
  NamedTensors more = good;
  more.emplace_back("surprise", ones({1}));
  more.emplace_back("0.step", tensor(3));
  refused(more, {"surprise is not known here", "0.step is there twice"});
  refused({}, {"group.0.lr is missing", "group.0.parameters is missing"});

  SGD sgd({leaf({1, 2}), leaf({1})}, {.momentum = 0.9});
  run_steps(sgd, 0, 1);
  refused(sgd.state_dict(), {"group.0.beta1 is missing", "0.exp_avg is missing", "0.momentum_buffer is not known here",
                             "group.0.momentum is not known here"});

  Adam larger({leaf({1, 2}), leaf({1}), leaf({1})});
  run_steps(larger, 0, 1);
  refused(larger.state_dict(), {"group 0 has 3 parameters in the state, but 2 here", "2.exp_avg is not known here"});
  Adam split({{.params = {leaf({1, 2})}}, {.params = {leaf({1})}}});
  refused(split.state_dict(), {"group 0 has 1 parameters in the state, but 2 here", "group.1.lr is not known here"});

  adam.load_state_dict(good);
  CHECK(adam.state_problems(good).empty());
}

TEST_CASE("a saved momentum without its buffer is refused") {
  Tensor p = leaf({1, 2});
  SGD sgd({p}, {.lr = 0.1});
  run_steps(sgd, 0, 1);
  const NamedTensors state = copy_of(sgd.state_dict());
  CHECK_ERROR(sgd.load_state_dict(with(state, "group.0.momentum", full({}, 0.9, {.dtype = float64}))), "[SGD]",
              "0.momentum_buffer is missing");
  CHECK_ERROR(sgd.load_state_dict(with(state, "group.0.nesterov", full({}, 1.0, {.dtype = float64}))), "[SGD]",
              "group.0: nesterov needs momentum");
}
