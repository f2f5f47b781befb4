// What an optimizer does for a step that was captured in a graph: it counts at each replay, and gives that step's
// updates. Here the test stands for the device that captures.
#include <memory>
#include <optional>

#include <tandem/tensor/create.h>
#include <tandem/tests/optim/support.h>

using namespace tandem;
using namespace tandem::test;

namespace {

class CapturedAdam final : public optim::Adam {
 public:
  using Adam::Adam;
  bool capture = false;
  /// A replay: the step numbers of the updates.
  std::vector<int64_t> replay() {
    std::vector<int64_t> steps;
    replayed_.check();
    for (const Update& update : replayed_.next()) steps.push_back(update.step);
    return steps;
  }
  Replayed take() { return std::move(replayed_); }

 protected:
  void update(std::size_t group, std::span<const Update> updates) override {
    if (capture)
      replayed_ = replayed(updates);
    else
      Adam::update(group, updates);
  }

 private:
  Replayed replayed_;
};

int64_t steps_of(const optim::Optimizer& optimizer, int parameter) {
  return entry(optimizer.state_dict(), std::to_string(parameter) + ".step").item<int64_t>();
}

}  // namespace

TEST_CASE("a captured step counts at its replays") {
  Tensor a = leaf({1, 2}), b = leaf({3});
  CapturedAdam optimizer({a, b});
  a.set_grad(ones_like(a));
  optimizer.step();
  b.set_grad(ones_like(b));
  optimizer.step();
  optimizer.capture = true;
  const Tensor before = a.detach().clone();
  optimizer.step();
  CHECK(equal(a.detach(), before));
  CHECK(steps_of(optimizer, 0) == 2);
  const std::uint32_t version = a.version();
  CHECK(optimizer.replay() == std::vector<int64_t>{3, 2});
  CHECK(optimizer.replay() == std::vector<int64_t>{4, 3});
  CHECK(a.version() > version);
  CHECK(steps_of(optimizer, 0) == 4);
  CHECK(steps_of(optimizer, 1) == 3);
  optimizer.capture = false;
  optimizer.step();  // an ordinary one goes on from there
  CHECK(steps_of(optimizer, 0) == 5);
}

TEST_CASE("a replay notices that the optimizer has changed under it") {
  Tensor a = leaf({1, 2});
  auto optimizer = std::make_unique<CapturedAdam>(std::vector<Tensor>{a});
  a.set_grad(ones_like(a));
  optimizer->capture = true;
  CHECK_ERROR((optimizer->step(), 0), "[Adam]", "parameter 0 has no state yet", "make one before");
  optimizer->capture = false;
  optimizer->step();
  CHECK(steps_of(*optimizer, 0) == 1);
  optimizer->capture = true;
  optimizer->step();
  optimizer->load_state_dict(optimizer->state_dict());
  CHECK_ERROR(optimizer->replay(), "[Adam]", "parameter 0 or its state has other memory", "capture the graph again");
  CHECK(steps_of(*optimizer, 0) == 1);
  const auto taken = optimizer->take();
  optimizer.reset();
  CHECK_ERROR((taken.check(), 0), "the optimizer whose step was captured is gone");
}
