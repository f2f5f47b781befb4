// A whole training run in one file: taken up again it gives the same bits as one that was never interrupted.
#include <tandem/nn/layers.h>
#include <tandem/nn/sequential.h>
#include <tandem/optim/adam.h>
#include <tandem/optim/lr_scheduler.h>
#include <tandem/tensor/io/checkpoint.h>
#include <tandem/tensor/random.h>

#include "support.h"

using namespace tandem;
using namespace tandem::test;

namespace {

struct Run {
  nn::Sequential model{nn::Linear(4, 8), nn::ReLU(), nn::Dropout(0.5), nn::Linear(8, 1)};
  optim::Adam optimizer;
  optim::StepLR scheduler;
  Progress progress;
  explicit Run(double lr) : optimizer(model->parameters(), {.lr = lr}), scheduler(optimizer, 3, 0.5) {}
  void train(int steps) {
    for (int i = 0; i < steps; ++i, ++progress.step) {
      Tensor loss = mean(pow(model(randn({16, 4})), 2));
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      scheduler.step();
      progress.numbers["loss"] += loss.item<double>();
    }
  }
};

}  // namespace

TEST_CASE("training goes on from a checkpoint with the same bits") {
  const Directory directory;
  const std::string path = directory / "run.safetensors";
  manual_seed(1);
  Run whole(0.01);
  whole.train(5);
  auto& [model, optimizer, scheduler, progress] = whole;
  save(path, {model, optimizer, scheduler, progress});
  whole.train(5);

  manual_seed(2);
  Run resumed(0.5);
  load(path, {resumed.model, resumed.optimizer, resumed.scheduler, resumed.progress});
  resumed.train(5);
  CHECK(resumed.progress.step == 10);
  CHECK(resumed.progress.numbers == whole.progress.numbers);
  CHECK(resumed.optimizer.lr() == whole.optimizer.lr());
  const std::vector<Tensor> wanted = whole.model->parameters(), found = resumed.model->parameters();
  REQUIRE(found.size() == wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) CHECK(equal(found[i], wanted[i]));
}

TEST_CASE("the model alone is loaded from the checkpoint of a run, and a wrong one is told apart") {
  const Directory directory;
  const std::string path = directory / "run.safetensors";
  Run run(0.01);
  run.train(1);
  save(path, {run.model, run.optimizer});
  nn::Sequential model{nn::Linear(4, 8), nn::ReLU(), nn::Dropout(0.5), nn::Linear(8, 1)};
  load(*model, path);
  CHECK(equal(model->parameters()[2], run.model->parameters()[2]));

  Run other(0.01);
  other.model = nn::Sequential(nn::Linear(4, 9), nn::Linear(9, 1));
  const Tensor before = other.model->parameters()[0].clone();
  CHECK_ERROR(load(path, {other.model, other.optimizer}), "nothing was changed", "model: ", "0.weight", "3.bias");
  CHECK(equal(other.model->parameters()[0], before));
}
