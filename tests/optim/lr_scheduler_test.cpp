// Schedules against numbers from PyTorch 1.13.1, and their state.
#include <memory>

#include <tandem/optim/lr_scheduler.h>
#include <tandem/tests/optim/support.h>

using namespace tandem;
using namespace tandem::test;
using namespace tandem::optim;

namespace {

void check_rates(Optimizer& optimizer, LRScheduler& schedule, const std::vector<double>& expected) {
  for (std::size_t t = 0; t < expected.size(); ++t) {
    CAPTURE(t);
    if (t > 0) {
      optimizer.step();
      schedule.step();
    }
    CHECK(schedule.step_count() == static_cast<int64_t>(t));
    CHECK(optimizer.lr() == doctest::Approx(expected[t]).epsilon(1e-13));
  }
}

/// Seven steps with `make`, and three + four with the state carried to what `make_other` makes: the same rates.
template <class Make, class MakeOther>
void check_resume(Make make, MakeOther make_other) {
  SGD whole({leaf({1})}, {.lr = 0.4}), first({leaf({1})}, {.lr = 0.4}), second({leaf({1})}, {.lr = 0.9});
  const auto a = make(whole), b = make(first), c = make_other(second);
  for (int t = 0; t < 3; ++t) {
    a->step();
    b->step();
  }
  CHECK(c->state_problems(b->state_dict()).empty());
  c->load_state_dict(b->state_dict());
  CHECK(second.lr() == whole.lr());
  CHECK(same_state(c->state_dict(), b->state_dict()));
  for (int t = 3; t < 7; ++t) {
    a->step();
    c->step();
    CHECK(second.lr() == whole.lr());
  }
}

}  // namespace

TEST_CASE("StepLR") {
  SGD sgd({leaf({1})}, {.lr = 0.4});
  StepLR schedule(sgd, 2, 0.5);
  check_rates(sgd, schedule, {0.4, 0.4, 0.2, 0.2, 0.1, 0.1, 0.05});
}

TEST_CASE("CosineAnnealingLR comes back up after t_max") {
  SGD sgd({leaf({1})}, {.lr = 0.4});
  CosineAnnealingLR schedule(sgd, 4, 0.1);
  check_rates(sgd, schedule,
              {0.4, 0.356066017177982, 0.25, 0.143933982822018, 0.1, 0.143933982822018, 0.25, 0.356066017177982, 0.4,
               0.356066017177982, 0.25});
}

TEST_CASE("LinearWarmup sets its first rate at once and then stays") {
  SGD sgd({leaf({1})}, {.lr = 0.4});
  LinearWarmup schedule(sgd, 3, 0.25);
  check_rates(sgd, schedule, {0.1, 0.2, 0.3, 0.4, 0.4, 0.4});
  SGD from_zero({leaf({1})}, {.lr = 0.4});
  LinearWarmup zero(from_zero, 2, 0);
  check_rates(from_zero, zero, {0, 0.2, 0.4});
}

TEST_CASE("LinearWarmup hands over to another schedule, which counts from there") {
  SGD sgd({leaf({1})}, {.lr = 0.4});
  LinearWarmup schedule(sgd, 2, 0.5, std::make_shared<CosineAnnealingLR>(sgd, 4, 0.1));
  check_rates(sgd, schedule, {0.2, 0.3, 0.4, 0.356066017177982, 0.25, 0.143933982822018, 0.1});
  Adam adam({leaf({1})}, {.lr = 0.4});
  LinearWarmup twice(adam, 1, 0.5, std::make_shared<LinearWarmup>(adam, 1, 0.5, std::make_shared<StepLR>(adam, 1)));
  CHECK(adam.lr() == doctest::Approx(0.2));
}

TEST_CASE("a schedule keeps the proportions of the groups") {
  SGD sgd({{.params = {leaf({1})}}, {.params = {leaf({1})}, .lr = 0.01}}, {.lr = 0.1});
  StepLR schedule(sgd, 1, 0.5);
  schedule.step();
  CHECK(sgd.lr(0) == 0.05);
  CHECK(sgd.lr(1) == 0.005);
  CHECK(entry(schedule.state_dict(), "base_lrs").to_vector<double>() == std::vector<double>{0.1, 0.01});
  sgd.add_param_group({.params = {leaf({1})}});
  CHECK_ERROR(schedule.step(), "[StepLR] the optimizer has 3 groups, but had 2", "after all groups");
  CHECK(schedule.step_count() == 1);
}

TEST_CASE("a schedule that was loaded goes on exactly, whatever the new one was made with") {
  check_resume([](Optimizer& o) { return std::make_unique<StepLR>(o, 2, 0.3); },
               [](Optimizer& o) { return std::make_unique<StepLR>(o, 5); });
  check_resume([](Optimizer& o) { return std::make_unique<CosineAnnealingLR>(o, 6, 0.01); },
               [](Optimizer& o) { return std::make_unique<CosineAnnealingLR>(o, 9); });
  check_resume(
      [](Optimizer& o) { return std::make_unique<LinearWarmup>(o, 4, 0.1, std::make_shared<StepLR>(o, 2, 0.5)); },
      [](Optimizer& o) { return std::make_unique<LinearWarmup>(o, 1, 0.9, std::make_shared<StepLR>(o, 1)); });
}

TEST_CASE("optimizer and schedule can be loaded in either order") {
  SGD source({leaf({1})}, {.lr = 0.4});
  StepLR schedule(source, 1, 0.5);
  schedule.step();
  for (const bool optimizer_first : {true, false}) {
    SGD target({leaf({1})}, {.lr = 0.1});
    StepLR loaded(target, 1);
    if (optimizer_first) target.load_state_dict(source.state_dict());
    loaded.load_state_dict(schedule.state_dict());
    if (!optimizer_first) target.load_state_dict(source.state_dict());
    CHECK(target.lr() == 0.2);
    loaded.step();
    CHECK(target.lr() == 0.1);
  }
}

TEST_CASE("the state of a schedule that does not fit is refused and changes nothing") {
  SGD sgd({leaf({1})}, {.lr = 0.4});
  StepLR step(sgd, 2, 0.5);
  step.step();
  CHECK(step.state_name() == "scheduler");
  const NamedTensors good = step.state_dict();
  CosineAnnealingLR cosine(sgd, 4);
  CHECK_ERROR(step.load_state_dict(cosine.state_dict()), "[StepLR] the state does not fit; load one that was saved",
              "step_size is missing", "gamma is missing", "t_max is not known here");
  SGD two({{.params = {leaf({1})}}, {.params = {leaf({1})}}});
  CHECK_ERROR(step.load_state_dict(StepLR(two, 1).state_dict()), "base_lrs is float64 {2}, but float64 {1} is needed");
  NamedTensors bad = good;
  bad[0].second = tensor(-1);
  bad[1].second = tensor(std::vector<double>{-3});
  bad[2].second = full({}, 0.5, {.dtype = float64});
  CHECK_ERROR(step.load_state_dict(bad), "step is -1, but at least 0 is needed", "an entry of base_lrs is -3",
              "step_size is 0.5; it must be a whole number");
  CHECK(step.state_problems(bad).size() == 3);
  CHECK(same_state(step.state_dict(), good));
}

TEST_CASE("schedules with numbers out of range") {
  SGD sgd({leaf({1})}, {.lr = 0.4}), other({leaf({1})});
  CHECK_ERROR(StepLR(sgd, 0), "[StepLR] step_size is 0; it must be a whole number of at least 1");
  CHECK_ERROR(StepLR(sgd, 1, -0.5), "[StepLR] gamma is -0.5; it must be a finite number that is not negative");
  CHECK_ERROR(CosineAnnealingLR(sgd, 0), "[CosineAnnealingLR] t_max is 0");
  CHECK_ERROR(CosineAnnealingLR(sgd, 1, -1), "[CosineAnnealingLR] eta_min is -1");
  CHECK_ERROR(LinearWarmup(sgd, 0), "[LinearWarmup] steps is 0");
  CHECK_ERROR(LinearWarmup(sgd, 1, 1.5), "[LinearWarmup] start_factor is 1.5; it must be between 0 and 1");
  CHECK_ERROR(LinearWarmup(sgd, 1, 0.5, std::make_shared<StepLR>(other, 1)),
              "[LinearWarmup] the schedule that follows belongs to another optimizer; make both for the same one");
  CHECK(sgd.lr() == 0.4);
}
