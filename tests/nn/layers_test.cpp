// The layers and the containers.
#include <tandem/autograd/grad_mode.h>
#include <tandem/nn/layers.h>
#include <tandem/nn/sequential.h>
#include <tandem/tensor/random.h>
#include <tandem/tests/support/test.h>

#include <algorithm>
#include <cmath>

using namespace tandem;

TEST_CASE("Linear: shapes, values, options, initial values") {
  manual_seed(1);
  const nn::Linear layer(400, 100);
  CHECK(layer->weight.shape() == Shape{100, 400});
  CHECK(layer->bias.shape() == Shape{100});
  // Uniform in (-1/sqrt(in), 1/sqrt(in)): the bound is 0.05 and the standard deviation 0.05 / sqrt(3).
  for (const Tensor& p : layer->parameters()) {
    CHECK(max(abs(p)).item<double>() <= 0.05);
    CHECK(max(p).item<double>() > 0.047);
    CHECK(min(p).item<double>() < -0.047);
  }
  CHECK(mean(layer->weight).item<double>() == doctest::Approx(0).epsilon(1e-3));
  CHECK(std::sqrt(var(layer->weight).item<double>()) == doctest::Approx(0.05 / std::sqrt(3.0)).epsilon(0.01));

  const nn::Linear small(2, 1);
  {
    const NoGradGuard no_grad;
    small->weight.copy_(tensor({{2.0, 3.0}}));
    small->bias.copy_(tensor({0.5}));
  }
  CHECK(equal(small(tensor({{1.0, 1.0}, {2.0, -1.0}})), tensor({{5.5}, {1.5}})));
  CHECK(small(ones({4, 3, 2})).shape() == Shape{4, 3, 1});
  CHECK_ERROR(small(ones({4, 3})), "[linear]", "{4, 3}", "{1, 2}");

  const nn::Linear plain(3, 2, {.bias = false, .dtype = float64});
  CHECK_FALSE(plain->bias.defined());
  CHECK(plain->parameters().size() == 1);
  CHECK(plain->weight.dtype() == float64);
  CHECK(plain->str() == "Linear(in_features=3, out_features=2, bias=False)");
  CHECK(nn::Linear(0, 2)(ones({3, 0})).shape() == Shape{3, 2});
  CHECK_ERROR(nn::Linear(-1, 2), "[Linear]", "in_features is -1");
  CHECK_ERROR(nn::Linear(1, 2, {.dtype = int64}), "the dtype is int64; it must be float32 or float64");
}

TEST_CASE("Linear: the same seed gives the same bits") {
  manual_seed(7);
  const nn::Linear a(10, 10);
  manual_seed(7);
  const nn::Linear b(10, 10);
  CHECK(equal(a->weight, b->weight));
  CHECK(equal(a->bias, b->bias));
  b->reset_parameters();
  CHECK_FALSE(equal(a->weight, b->weight));
}

TEST_CASE("activations are the functions of their names") {
  const Tensor x = tensor({{-1.0, 0.0, 2.0}});
  CHECK(equal(nn::ReLU()(x), relu(x)));
  CHECK(equal(nn::Sigmoid()(x), sigmoid(x)));
  CHECK(equal(nn::Tanh()(x), tanh(x)));
  CHECK(equal(nn::GELU()(x), gelu(x)));
  CHECK(equal(nn::Softmax(1)(x), softmax(x, 1)));
  CHECK(equal(nn::Identity()(x), x));
  CHECK(nn::ReLU()->str() == "ReLU()");
  CHECK(nn::Softmax(-1)->str() == "Softmax(dim=-1)");
  CHECK_ERROR(nn::Softmax(2)(x), "[softmax]");
}

TEST_CASE("Flatten") {
  const Tensor x = ones({2, 3, 4, 5});
  CHECK(nn::Flatten()(x).shape() == Shape{2, 60});
  CHECK(nn::Flatten(0)(x).shape() == Shape{120});
  CHECK(nn::Flatten(1, 2)(x).shape() == Shape{2, 12, 5});
  CHECK(nn::Flatten(1, 2)->str() == "Flatten(start_dim=1, end_dim=2)");
}

TEST_CASE("Dropout works in training only") {
  manual_seed(3);
  const nn::Dropout drop(0.25);
  const Tensor x = ones({10000});
  const std::vector<float> y = drop(x).to_vector<float>();
  const auto zeroed = static_cast<double>(std::count(y.begin(), y.end(), 0.0f));
  CHECK(zeroed == doctest::Approx(2500).epsilon(0.1));
  CHECK(*std::max_element(y.begin(), y.end()) == doctest::Approx(1 / 0.75));
  drop->eval();
  CHECK(equal(drop(x), x));
  CHECK(drop->str() == "Dropout(p=0.25)");
  CHECK(nn::Dropout()->str() == "Dropout(p=0.5)");
  CHECK(max(nn::Dropout(1)(x)).item<float>() == 0);
  CHECK_ERROR(nn::Dropout(1.5), "[Dropout]", "the probability is 1.5; it must lie in 0..1");
}

TEST_CASE("Sequential: the fused Linear and ReLU give the values of the two") {
  manual_seed(4);
  for (const bool bias : {true, false}) {
    const nn::Linear first(20, 30, {.bias = bias}), second(30, 5, {.bias = bias});
    const nn::Sequential net(first, nn::ReLU(), second, nn::ReLU(), nn::ReLU(), nn::Identity());
    const Tensor x = randn({40, 20});
    const Tensor expected = relu(second(relu(first(x))));
    sum(expected).backward();
    const Tensor gradient = first->weight.grad().clone();
    net->zero_grad();
    const Tensor y = net(x);
    CHECK_CLOSE(y, expected, 1e-6);
    sum(y).backward();
    CHECK_CLOSE(first->weight.grad(), gradient, 1e-5);
    CHECK(equal(net({x}).at(0), y));
  }
}

TEST_CASE("Sequential: classes derived from Linear and ReLU are called as they are") {
  struct Odd : nn::ReLUImpl {
    Tensor forward(const Tensor& x) override { return -x; }
  };
  struct Half : nn::LinearImpl {
    using nn::LinearImpl::LinearImpl;
    Tensor forward(const Tensor& x) override { return nn::LinearImpl::forward(x) * 0.5; }
  };
  const nn::Linear layer(3, 3);
  const auto half = std::make_shared<Half>(3, 3);
  const Tensor x = randn({4, 3});
  CHECK(equal(nn::Sequential(layer, std::make_shared<Odd>())(x), -layer(x)));
  CHECK(equal(nn::Sequential(half, nn::ReLU())(x), relu(half->forward(x))));
  CHECK(equal(nn::Sequential(half, nn::ReLU())({x}).at(0), relu(half->forward(x))));
}

TEST_CASE("Sequential: several inputs go through forward_all") {
  struct Sum : nn::Module {
    std::vector<Tensor> forward_all(std::span<const Tensor> in) override { return {in[0] + in[1]}; }
  };
  struct Split : nn::Module {
    std::vector<Tensor> forward_all(std::span<const Tensor> in) override { return {in[0], in[0] * 10}; }
  };
  const nn::Sequential net(std::make_shared<Sum>(), std::make_shared<Split>());
  const std::vector<Tensor> out = net({tensor({1.0}), tensor({2.0})});
  CHECK(out.size() == 2);
  CHECK(out[1].item<int>() == 30);
}

TEST_CASE("Sequential and ModuleList grow and are indexed") {
  nn::Sequential net;
  CHECK(net->empty());
  CHECK(net->str() == "Sequential()");
  const Tensor x = ones({2, 2});
  CHECK(equal(net(x), x));
  net->push_back(nn::Linear(2, 3));
  net->push_back(std::make_shared<nn::ReLUImpl>());
  CHECK(net->size() == 2);
  CHECK(net(x).shape() == Shape{2, 3});
  CHECK(net->at<nn::LinearImpl>(0).weight.shape() == Shape{3, 2});
  CHECK((*net)[1]->name() == "ReLU");
  CHECK_ERROR((*net)[2], "index 2 is out of range: there are 2 modules");
  CHECK_ERROR(net->at<nn::LinearImpl>(1), "module 1 is a ReLU");

  const nn::ModuleList list(nn::Linear(2, 2), nn::ReLU());
  CHECK(list->str() == "ModuleList(\n  (0): Linear(in_features=2, out_features=2, bias=True)\n  (1): ReLU()\n)");
  CHECK(list->named_parameters()[0].first == "0.weight");
  CHECK_ERROR(list(x), "ModuleList overrides neither forward nor forward_all");
}
