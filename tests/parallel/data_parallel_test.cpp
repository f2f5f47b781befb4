// DataParallel against one device: same losses, same weights.
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include <tandem/tandem.h>
#include <tandem/tests/support/test.h>

using namespace tandem;

namespace {

struct Devices {
  explicit Devices(int count) : before(device_count(DeviceType::cpu)) { set_cpu_device_count(count); }
  ~Devices() { set_cpu_device_count(before); }
  int before;
};

std::shared_ptr<nn::SequentialImpl> make_net(DType dtype = float64) {
  manual_seed(7);
  auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(6, 16), nn::ReLU(), nn::Linear(16, 4));
  net->to(dtype);
  return net;
}

template <class Step>
std::vector<Tensor> train(nn::Module& net, const Step& step, int64_t rows) {
  optim::Adam optimizer(net.parameters(), {.lr = 1e-2, .weight_decay = 1e-2});
  manual_seed(3);
  for (int i = 0; i < 20; ++i) {
    const Tensor x = randn({rows, 6}, {.dtype = float64}), y = randint(0, 4, {rows});
    step(x, y).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return net.parameters();
}

void check_equal_weights(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) CHECK_CLOSE(a[i].detach(), b[i].detach(), 1e-10);
}

}  // namespace

// pytorch#19540 (replicas without gradient edges never train); #15161, #52260, #16432 (9 rows on 4 devices, 3 on 8).
TEST_CASE("after 20 steps DataParallel has the weights of one device") {
  for (const auto& [batch, count_of_devices] : {std::pair{8, 2}, {9, 4}, {36, 7}, {3, 8}, {1, 4}, {13, 3}, {5, 1}}) {
    const int rows = batch, devices = count_of_devices;  // clang 14 captures no structured bindings
    CAPTURE(rows);
    CAPTURE(devices);
    const Devices count(devices);
    Tensor weight = tensor({1.0, 0.5, 2.0, 0.0}, {.dtype = float64});
    const nn::CrossEntropyLoss loss_fn({.weight = weight, .ignore_index = 1, .label_smoothing = 0.1});
    const auto alone = make_net();
    const auto expected = train(
        *alone, [&](auto& x, auto& y) { return loss_fn((*alone)(x), y); }, rows);
    const auto net = make_net();
    parallel::DataParallel model(net);
    check_equal_weights(train(
                            *net, [&](auto& x, auto& y) { return loss_fn(model(x), y); }, rows),
                        expected);
    const auto with_loss = make_net();
    parallel::DataParallel loss_model(with_loss);
    check_equal_weights(train(
                            *with_loss, [&](auto& x, auto& y) { return loss_model.loss(loss_fn, x, y); }, rows),
                        expected);
  }
}

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

TEST_CASE("a parameter's hooks see the summed gradient once") {
  const Devices count(4);
  auto net = make_net();
  parallel::DataParallel model(net);
  int calls = 0;
  const auto handle =
      autograd::register_post_accumulate_grad_hook(net->parameters()[0], [&](const Tensor&) { ++calls; });
  sum(model(randn({8, 6}, {.dtype = float64}))).backward();
  CHECK(calls == 1);
}

TEST_CASE("names are the module's own, and a file of one mode loads in another") {
  const Devices count(2);
  auto net = make_net();
  parallel::DataParallel model(net);
  const auto inner = net->named_parameters(), outer = model.named_parameters();
  REQUIRE(inner.size() == outer.size());
  for (std::size_t i = 0; i < inner.size(); ++i) CHECK(inner[i].first == outer[i].first);
}

TEST_CASE("values changed between two forwards reach every replica") {
  const Devices count(2);
  auto net = std::make_shared<nn::LinearImpl>(1, 1, nn::LinearOptions{.bias = false});
  parallel::DataParallel model(net);
  for (const double value : {2.0, 5.0}) {
    const NoGradGuard no_grad;
    net->weight.fill_(value);
    CHECK(equal(model(ones({4, 1})), full({4, 1}, value)));
  }
}

TEST_CASE("replica 0's buffer writes are kept") {
  const Devices count(2);
  struct Counter : nn::Module {
    Tensor forward(const Tensor& x) override {
      const NoGradGuard no_grad;
      calls.add_(1);
      return x + calls;
    }
    nn::Buffer calls = register_buffer("calls", zeros({}));
  };
  auto net = std::make_shared<Counter>();
  parallel::DataParallel model(net);
  (void)model(zeros({4, 1}));
  CHECK(equal(model(zeros({4, 1})), full({4, 1}, 2.0)));
  CHECK(net->calls.item<float>() == 2);
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
  CHECK_ERROR(model({zeros({3, 1}), zeros({2, 1})}), "DataParallel", "{3, 1}", "{2, 1}");
}

TEST_CASE("a backward that throws leaves nothing behind for the next") {
  const Devices count(2);
  auto net = make_net();
  parallel::DataParallel model(net);
  const Tensor x = randn({8, 6}, {.dtype = float64});
  sum(model(x)).backward();
  const Tensor expected = net->parameters()[0].grad().clone();
  net->zero_grad();
  {
    const auto handle = autograd::register_post_accumulate_grad_hook(
        net->parameters()[3], [](const Tensor&) { throw Error("the hook refuses"); });
    CHECK_ERROR(sum(model(x)).backward(), "the hook refuses");
  }
  net->zero_grad();
  sum(model(x)).backward();
  CHECK(equal(net->parameters()[0].grad(), expected));
}

TEST_CASE("a backward that throws does not keep the next from reducing a graph made before") {
  struct Fragile : autograd::Function<Fragile> {
    Tensor forward(autograd::Context&, const Tensor& x, const std::atomic<bool>* broken) {
      broken_ = broken;
      return x * 1;
    }
    std::vector<Tensor> backward(autograd::Context&, const std::vector<Tensor>& gradients) {
      check(!*broken_, "Fragile", "breaks");
      return gradients;
    }
    const std::atomic<bool>* broken_ = nullptr;
  };
  struct Net : nn::Module {
    Tensor forward(const Tensor& x) override { return Fragile::apply(fc(x), &broken); }
    nn::Linear fc = register_module("fc", nn::Linear(3, 2));
    std::atomic<bool> broken{false};
  };
  const Devices count(2);
  auto net = std::make_shared<Net>();
  parallel::DataParallel model(net);
  const Tensor first = sum(model(ones({4, 3}))), second = sum(model(ones({6, 3})));
  net->broken = true;
  CHECK_ERROR(first.backward(), "breaks");
  net->broken = false;
  second.backward();
  CHECK_CLOSE(net->fc->weight.grad(), full({2, 3}, 6.0), 1e-6);
}

TEST_CASE("two wrappers of one module keep their own graphs") {
  const Devices count(2);
  auto net = std::make_shared<nn::LinearImpl>(3, 2);
  parallel::DataParallel a(net), b(net);
  const Tensor first = sum(a(ones({4, 3}))), other = sum(b(ones({5, 3}))), second = sum(a(ones({6, 3})));
  (first + other + second).backward();
  CHECK_CLOSE(net->weight.grad(), full({2, 3}, 15.0), 1e-6);
}

TEST_CASE("backwards of several threads through one model all arrive") {
  const Devices count(2);
  auto net = std::make_shared<nn::LinearImpl>(3, 2);
  parallel::DataParallel model(net);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) sum(model(ones({4, 3}))).backward();
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_CLOSE(net->weight.grad(), full({2, 3}, 800.0), 1e-6);
}

TEST_CASE("a model that is converted between forward and backward is an error") {
  const Devices count(2);
  auto net = std::make_shared<nn::LinearImpl>(3, 2);
  parallel::DataParallel model(net);
  const Tensor loss = sum(model(ones({4, 3})));
  net->to(float64);
  CHECK_ERROR(loss.backward(), "[accumulate_grad]", "float64");
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
  parallel::DataParallel fails(std::make_shared<Fails>());
  CHECK_ERROR(fails(ones({4, 1})), "replica 1 on cpu:1", "refuses");
  parallel::DataParallel model(net);
  CHECK_ERROR(model.loss(nn::CrossEntropyLoss({.reduction = Reduction::none}), zeros({2, 6}), zeros({2})),
              "Reduction::none");
  CHECK_ERROR(model.loss(nn::CrossEntropyLoss(), zeros({2, 6}, {.dtype = float64}), zeros({3}, {.dtype = int64})),
              "different numbers of rows");
}
