// DataParallel::loss: the loss of the whole batch from parts that are computed where the outputs are.
#include <tandem/tests/parallel/virtual_devices.h>

using namespace tandem;
using namespace tandem::test;

namespace {

struct Identity : nn::Module {
  Tensor forward(const Tensor& x) override { return x * 1; }
};

Tensor labels(const std::vector<int64_t>& values) { return tensor(values); }

}  // namespace

TEST_CASE("every reduction of every loss is that of the whole batch") {
  const Devices count(3);
  parallel::DataParallel model(std::make_shared<Identity>());
  const Tensor x = randn({7, 4}, {.dtype = float64}), y = labels({0, 3, 1, -100, 2, 2, 1});
  const Tensor weight = tensor({1.0, 0.5, 2.0, 0.25}, {.dtype = float64});
  for (const Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none}) {
    const nn::CrossEntropyLoss entropy({.weight = weight, .reduction = reduction});
    CHECK_CLOSE(model.loss(entropy, x, y), entropy(x, y), 1e-12);
    const nn::NLLLoss nll({.weight = weight, .reduction = reduction});
    CHECK_CLOSE(model.loss(nll, x, y), nll(x, y), 1e-12);
    const nn::MSELoss squares({.reduction = reduction});
    const Tensor target = randn({7, 4}, {.dtype = float64});
    CHECK_CLOSE(model.loss(squares, x, target), squares(x, target), 1e-12);
  }
}

TEST_CASE("a function says whether it gives a mean, a sum or the rows") {
  const Devices count(3);
  parallel::DataParallel model(std::make_shared<Identity>());
  Tensor x = randn({7, 4}, {.dtype = float64}).requires_grad_();
  const Tensor y = randn({7, 4}, {.dtype = float64});
  auto rows = [](const Tensor& a, const Tensor& b) { return sum(abs(a - b), 1); };
  auto total = [&](const Tensor& a, const Tensor& b) { return sum(rows(a, b)); };
  auto average = [&](const Tensor& a, const Tensor& b) { return mean(rows(a, b)); };
  CHECK_CLOSE(model.loss(rows, Reduction::none, x, y), rows(x, y), 1e-12);
  CHECK_CLOSE(model.loss(total, Reduction::sum, x, y), total(x, y), 1e-12);
  const Tensor loss = model.loss(average, Reduction::mean, x, y);
  CHECK_CLOSE(loss, average(x, y), 1e-12);
  loss.backward();
  const Tensor gradient = x.grad().clone();
  x.set_grad({});
  average(x, y).backward();
  CHECK_CLOSE(gradient, x.grad(), 1e-12);
  CHECK_ERROR(model.loss(rows, Reduction::mean, x, y), "replica 0 on cpu:0",
              "the loss function gave a tensor of shape {3}", "Reduction::none");
}

TEST_CASE("nothing to take a mean of is 0, and so is its gradient") {
  const Devices count(2);
  auto net = std::make_shared<nn::LinearImpl>(2, 3);
  parallel::DataParallel model(net);
  for (const int64_t rows : {0, 4}) {
    const Tensor loss = model.loss(nn::CrossEntropyLoss(), randn({rows, 2}), full({rows}, -100));
    CHECK(loss.item<double>() == 0);
    loss.backward();
    CHECK(equal(net->weight.grad(), zeros({3, 2})));
  }
}

TEST_CASE("a function's mean or sum over no rows is 0, and so is its gradient") {
  for (const int devices : {1, 2}) {
    CAPTURE(devices);
    const Devices count(devices);
    auto net = std::make_shared<nn::LinearImpl>(2, 3);
    parallel::DataParallel model(net);
    auto average = [](const Tensor& output, const Tensor& target) { return mean(output - target); };
    for (const Reduction reduction : {Reduction::mean, Reduction::sum}) {
      const Tensor loss = model.loss(average, reduction, zeros({0, 2}), zeros({0, 3}));
      CHECK(loss.item<double>() == 0);
      loss.backward();
      CHECK(equal(net->weight.grad(), zeros({3, 2})));
      net->zero_grad();
    }
  }
}

TEST_CASE("one device computes the plain loss") {
  const Devices count(1);
  parallel::DataParallel model(std::make_shared<Identity>());
  const Tensor x = randn({5, 3}), y = labels({0, 1, 2, 0, 1});
  CHECK(equal(model.loss(nn::CrossEntropyLoss(), x, y), cross_entropy(x, y)));
  auto total = [](const Tensor& a, const Tensor&) { return sum(a); };
  CHECK(equal(model.loss(total, Reduction::sum, x, y), sum(x)));
}

TEST_CASE("inputs and labels may be on any device, and the loss goes to the output device") {
  const Devices count(3);
  parallel::DataParallel model(std::make_shared<Identity>(), {.output_device = "cpu:2"});
  const Tensor x = randn({5, 3}), y = labels({0, 1, 2, 0, 1});
  const Tensor loss = model.loss(nn::CrossEntropyLoss(), x.to(Device("cpu:1")), y.to(Device("cpu:2")));
  CHECK(loss.device() == Device("cpu:2"));
  CHECK_CLOSE(loss.to(Device("cpu:0")), cross_entropy(x, y), 1e-6);
}

TEST_CASE("inputs and targets must have equally many rows") {
  const Devices count(2);
  parallel::DataParallel model(std::make_shared<Identity>());
  CHECK_ERROR(model.loss(nn::CrossEntropyLoss(), zeros({2, 6}), labels({0, 0, 0})), "[DataParallel]",
              "{2, 6} and the target {3} have different numbers of rows");
  CHECK_ERROR(model.loss(nn::MSELoss(), zeros({2, 6}), zeros({})), "different numbers of rows");
}
