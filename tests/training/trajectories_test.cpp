// Losses, gradients and weights over 50 steps on Fashion-MNIST against PyTorch's, from a start that both compute by
// formula. trajectories.json was made with PyTorch 1.13.1 in float32 on one thread.
#include <cmath>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include <tandem/tandem.h>
#include <tandem/tests/support/test.h>

using namespace tandem;

namespace {

// Parameter number l, flat index k: sin(0.7 k + l) / sqrt(fan) * cos(0.013 k (l + 1)), in double, rounded once.
void set_start_weights(nn::Module& model) {
  const NoGradGuard no_grad;
  int l = 0;
  for (Tensor& p : model.parameters()) {
    const double fan = p.dim() == 2 ? static_cast<double>(p.size(1)) : 512.0;
    float* data = p.data<float>();
    for (int64_t k = 0; k < p.numel(); ++k) {
      const double x = static_cast<double>(k);
      data[k] = static_cast<float>(std::sin(0.7 * x + l) / std::sqrt(fan) * std::cos(0.013 * x * (l + 1)));
    }
    ++l;
  }
}

std::unique_ptr<optim::Optimizer> make_optimizer(const std::string& name, const std::vector<Tensor>& p) {
  using namespace optim;
  if (name == "sgd lr=1e-3") return std::make_unique<SGD>(p, SGDOptions{.lr = 1e-3});
  if (name == "sgd lr=0.1") return std::make_unique<SGD>(p, SGDOptions{.lr = 0.1});
  if (name == "sgd lr=0.05 momentum=0.9") return std::make_unique<SGD>(p, SGDOptions{.lr = 0.05, .momentum = 0.9});
  if (name == "sgd lr=0.05 momentum=0.9 nesterov weight_decay=1e-4")
    return std::make_unique<SGD>(p, SGDOptions{.lr = 0.05, .momentum = 0.9, .weight_decay = 1e-4, .nesterov = true});
  if (name == "adam lr=1e-3") return std::make_unique<Adam>(p, AdamOptions{.lr = 1e-3});
  if (name == "adam lr=1e-3 weight_decay=1e-2")
    return std::make_unique<Adam>(p, AdamOptions{.lr = 1e-3, .weight_decay = 1e-2});
  if (name == "adam lr=1e-3 amsgrad") return std::make_unique<Adam>(p, AdamOptions{.lr = 1e-3, .amsgrad = true});
  if (name == "adamw lr=1e-3 weight_decay=1e-2")
    return std::make_unique<AdamW>(p, AdamWOptions{.lr = 1e-3, .weight_decay = 1e-2});
  fail("trajectories", "the file has a run '{}' that this test does not know", name);
}

double length(const Tensor& t) { return norm(t.detach().to(float64)).item<double>(); }

std::vector<int64_t> rows(int64_t first, int64_t count) { return arange(first, first + count).to_vector<int64_t>(); }

}  // namespace

TEST_CASE("training follows PyTorch's trajectories") {
  std::ifstream file(TRAJECTORIES);
  REQUIRE(file.good());
  const auto runs = nlohmann::json::parse(file);
  REQUIRE(runs.size() == 8);
  const data::FashionMNIST train_set({.train = true}), test_set({.train = false});
  const auto [test_x, test_y] = test_set.get_batch(rows(0, 1000));
  const nn::CrossEntropyLoss loss_fn;
  for (const auto& run : runs) {
    const auto name = run["name"].get<std::string>();
    CAPTURE(name);
    nn::Sequential model(nn::Flatten(), nn::Linear(784, 512), nn::ReLU(), nn::Linear(512, 512), nn::ReLU(),
                         nn::Linear(512, 10));
    set_start_weights(*model);
    const auto optimizer = make_optimizer(name, model->parameters());
    const auto batch_size = run["batch_size"].get<int64_t>();
    for (int64_t i = 0; i < run["steps"].get<int64_t>(); ++i) {
      CAPTURE(i);
      const auto [x, y] = train_set.get_batch(rows(i * batch_size, batch_size));
      const Tensor loss = loss_fn(model(x), y);
      const double expected = run["losses"][static_cast<std::size_t>(i)].get<double>();
      // Sums differ in order, and Adam magnifies that.
      CHECK(loss.item<double>() == doctest::Approx(expected).epsilon(i < 10 ? 1e-4 : 5e-3));
      loss.backward();
      if (i == 0)
        for (std::size_t p = 0; p < 6; ++p)
          CHECK(length(model->parameters()[p].grad()) ==
                doctest::Approx(run["first_grad_norms"][p].get<double>()).epsilon(1e-5));
      optimizer->step();
      optimizer->zero_grad();
    }
    for (std::size_t p = 0; p < 6; ++p)
      CHECK(length(model->parameters()[p]) == doctest::Approx(run["final_param_norms"][p].get<double>()).epsilon(5e-3));
    const NoGradGuard no_grad;
    const Tensor logits = model(test_x);
    const auto correct = sum(argmax(logits, 1) == test_y).item<int64_t>();
    CHECK(std::abs(correct - run["test1000_correct"].get<int64_t>()) <= 8);
    CHECK(loss_fn(logits, test_y).item<double>() == doctest::Approx(run["test1000_loss"].get<double>()).epsilon(5e-3));
  }
}
