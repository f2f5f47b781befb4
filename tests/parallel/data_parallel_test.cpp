// What a DataParallel is to its user: inputs and outputs of every kind, names, modes, errors.
#include <mutex>
#include <set>

#include <tandem/tests/parallel/virtual_devices.h>

using namespace tandem;
using namespace tandem::test;

TEST_CASE("every replica runs on its own device, and the output is on the first") {
  const Devices count(3);
  struct Watch : nn::Module {
    Tensor forward(const Tensor& x) override {
      const std::lock_guard lock(mutex);
      seen.insert(x.device().str() + " " + x.shape().str() + " " + weight.device().str());
      return x * weight;
    }
    nn::Parameter weight = register_parameter("weight", ones({2}));
    std::mutex mutex;
    std::set<std::string> seen;
  };
  auto net = std::make_shared<Watch>();
  parallel::DataParallel model(net);
  const Tensor y = model(ones({7, 2}));
  CHECK(y.device() == Device("cpu:0"));
  CHECK(y.shape() == Shape{7, 2});
  CHECK(net->seen == std::set<std::string>{"cpu:0 {3, 2} cpu:0", "cpu:1 {2, 2} cpu:1", "cpu:2 {2, 2} cpu:2"});
  CHECK(net->weight.device() == Device("cpu:0"));
}

TEST_CASE("names are the module's own, and a file of one mode loads in another") {
  const Devices count(2);
  auto net = make_net();
  parallel::DataParallel model(net);
  const auto inner = net->named_parameters(), outer = model.named_parameters();
  REQUIRE(inner.size() == outer.size());
  for (std::size_t i = 0; i < inner.size(); ++i) CHECK(inner[i].first == outer[i].first);
}

// pytorch#7956, #9811: gather fails on scalar outputs.
TEST_CASE("single-number outputs become a vector with one entry a replica") {
  const Devices count(3);
  struct Mean : nn::Module {
    Tensor forward(const Tensor& x) override { return mean(x); }
  };
  parallel::DataParallel model(std::make_shared<Mean>());
  CHECK(model(ones({6, 2})).shape() == Shape{3});
}

TEST_CASE("several inputs and outputs, and an empty batch") {
  const Devices count(2);
  struct Two : nn::Module {
    std::vector<Tensor> forward_all(std::span<const Tensor> in) override { return {in[0] + in[1], in[0] * in[1]}; }
  };
  parallel::DataParallel model(std::make_shared<Two>());
  const auto out = model({full({3, 1}, 2.0), full({3, 1}, 5.0)});
  CHECK(equal(out[0], full({3, 1}, 7.0)));
  CHECK(equal(out[1], full({3, 1}, 10.0)));
  CHECK(model({zeros({0, 1}), zeros({0, 1})})[0].shape() == Shape{0, 1});
  CHECK_ERROR(model({zeros({3, 1}), zeros({2, 1})}), "[scatter]", "{3, 1} and {2, 1}");
}

TEST_CASE("evaluation under NoGradGuard records nothing") {
  const Devices count(2);
  auto net = make_net();
  parallel::DataParallel model(net);
  const NoGradGuard no_grad;
  CHECK_FALSE(model(randn({4, 6}, {.dtype = float64})).requires_grad());
  CHECK(net->parameters()[0].requires_grad());
}

TEST_CASE("mistakes are sentences") {
  const Devices count(2);
  auto net = make_net();
  CHECK_ERROR(parallel::DataParallel(nullptr), "the module is empty");
  CHECK_ERROR(parallel::DataParallel(std::make_shared<parallel::DataParallel>(net)), "contains a DataParallel");
  CHECK_ERROR(parallel::DataParallel(net, {.device_ids = {"cpu:0", "cpu:2"}}), "cpu:2 does not exist");
  CHECK_ERROR(parallel::DataParallel(net, {.device_ids = {0, 0}}), "cpu:0 is listed twice");
  CHECK_ERROR(parallel::DataParallel(net, {.device_ids = {1}}), "'0.weight' is on cpu:0", "call module->to(\"cpu:1\")");
  struct Fails : nn::Module {
    Tensor forward(const Tensor& x) override {
      check(x.device() != Device("cpu:1"), "Fails", "refuses");
      return x;
    }
  };
  struct Several : nn::Module {
    std::vector<Tensor> forward_all(std::span<const Tensor> in) override { return {in[0], in[0]}; }
  };
  parallel::DataParallel fails(std::make_shared<Fails>());
  CHECK_ERROR(fails(ones({4, 1})), "replica 1 on cpu:1", "refuses");
  parallel::DataParallel several(std::make_shared<Several>());
  CHECK_ERROR(several(ones({4, 1})), "[DataParallel]", "returned 2 tensors where one is needed");
  CHECK_ERROR(several.forward_all({}), "[DataParallel]", "the first input must be a tensor with rows");
  CHECK_ERROR(several(ones({})), "the first input must be a tensor with rows");
  struct Hides : nn::Module {
    explicit Hides(std::shared_ptr<nn::Module> m) : inner(std::move(m)) {}
    Tensor forward(const Tensor& x) override { return (*inner)(x); }
    std::shared_ptr<nn::Module> inner;  // not registered
  };
  parallel::DataParallel outer(std::make_shared<Hides>(std::make_shared<parallel::DataParallel>(net)));
  CHECK_ERROR(outer(ones({4, 6}, {.dtype = float64})), "replica 0 on cpu:0",
              "inside a replica of another DataParallel");
}

TEST_CASE("the error is that of the first replica that fails, also with several on a device") {
  const Devices count(2);
  struct Fails : nn::Module {
    Tensor forward(const Tensor& x) override {
      check(x.item<float>() < 2, "Fails", "refuses {}", x.item<float>());
      return x;
    }
  };
  parallel::DataParallel model(std::make_shared<Fails>(), {.replicas = 5});
  CHECK_ERROR(model(arange(5).to(float32)), "replica 2 on cpu:0: [Fails] refuses 2");
  CHECK_ERROR(model(tensor({0.0, 0.0, 0.0, 5.0, 9.0}, {.dtype = float32})), "replica 3 on cpu:1: [Fails] refuses 5");
  CHECK(equal(model(ones({5})), ones({5})));
}

TEST_CASE("a replica without rows is not called") {
  const Devices count(2);
  struct Sees : nn::Module {
    Tensor forward(const Tensor& x) override {
      const std::lock_guard lock(mutex);
      seen.insert(x.shape().str() + " " + x.device().str());
      return x;
    }
    std::mutex mutex;
    std::multiset<std::string> seen;
  };
  auto net = std::make_shared<Sees>();
  parallel::DataParallel model(net, {.replicas = 3, .part_sizes = {0, 3, 1}});
  CHECK(equal(model(arange(4)), arange(4)));
  CHECK(net->seen == std::multiset<std::string>{"{3} cpu:1", "{1} cpu:0"});
  net->seen.clear();
  CHECK(model(zeros({0, 2})).shape() == Shape{0, 2});
  CHECK(net->seen == std::multiset<std::string>{"{0, 2} cpu:0"});
}

TEST_CASE("another dimension, another output device, and inputs from anywhere") {
  const Devices count(3);
  struct Sum : nn::Module {
    Tensor forward(const Tensor& x) override { return sum(x, 0); }
  };
  parallel::DataParallel model(std::make_shared<Sum>(), {.device_ids = {2, 0}, .output_device = 1, .dim = 1});
  Tensor x = arange(10).to(float32).view({2, 5}).to(Device("cpu:1")).requires_grad_();
  const Tensor y = model(x);
  CHECK(y.device() == Device("cpu:1"));
  CHECK(equal(y, sum(x, 0)));
  sum(y * y).backward();
  CHECK(equal(x.grad(), (sum(x.detach(), 0) * 2).expand({2, 5})));
}

TEST_CASE("train and eval reach every replica") {
  const Devices count(2);
  auto net = std::make_shared<nn::SequentialImpl>(nn::Dropout(0.5));
  parallel::DataParallel model(net);
  const Tensor x = ones({200, 1});
  const Tensor trained = model(x);
  CHECK_FALSE(equal(trained, x));
  CHECK_FALSE(equal(trained.narrow(0, 0, 100), trained.narrow(0, 100, 100)));  // each has its own random numbers
  model.eval();
  CHECK(equal(model(x), x));
}

TEST_CASE("on one device it is the plain module") {
  const Devices count(1);
  auto net = make_net();
  parallel::DataParallel model(net);
  const Tensor x = randn({3, 6}, {.dtype = float64});
  CHECK(equal(model(x), (*net)(x)));
  CHECK_FALSE(net->parameters()[0].identity()->replicas);
  CHECK(test::contains(model.str(), "devices=[cpu:0] (one device: TANDEM_CPU_DEVICES=k"));
}

TEST_CASE("the wrapped module can be had back") {
  const auto net = make_net();
  CHECK(parallel::DataParallel(net).module() == net);
}

TEST_CASE("printing names the devices and replicas") {
  const Devices count(2);
  CHECK(
      test::contains(parallel::DataParallel(make_net(), {.replicas = 3}).str(), "devices=[cpu:0, cpu:1], replicas=3"));
}
