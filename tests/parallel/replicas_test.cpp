// How DataParallel does it: where parameters and gradients lie, and what becomes of a gradient in every kind of
// backward.
#include <atomic>
#include <barrier>
#include <thread>

#include <tandem/tests/parallel/virtual_devices.h>

using namespace tandem;
using namespace tandem::test;

namespace {

const Device kFirst("cpu:0");

bool same_memory(const Tensor& a, const Tensor& b) { return a.raw().data == b.raw().data; }

// Expects of `net` the gradients that `reference` has.
void check_gradients(const nn::Module& net, const nn::Module& reference) {
  const auto a = net.parameters(), b = reference.parameters();
  for (std::size_t i = 0; i < a.size(); ++i) {
    CAPTURE(i);
    REQUIRE(a[i].grad().defined() == b[i].grad().defined());
    if (a[i].grad().defined()) CHECK_CLOSE(a[i].grad(), b[i].grad(), 1e-12);
  }
}

}  // namespace

TEST_CASE("replicas work at the same time, each on its device, on the module's own parameters") {
  const Devices count(3);
  struct Meets : nn::Module {
    Tensor forward(const Tensor& x) override {
      meeting.arrive_and_wait();  // hangs unless all three are here
      addresses[static_cast<std::size_t>(x.device().index())] = weight.raw().data;
      CHECK(weight.device() == x.device());
      return x * weight;
    }
    nn::Parameter weight = register_parameter("weight", ones({2}));
    std::barrier<> meeting{3};
    std::array<const void*, 3> addresses{};
  };
  auto net = std::make_shared<Meets>();
  parallel::DataParallel model(net);
  CHECK(equal(model(ones({7, 2})), ones({7, 2})));
  for (const void* address : net->addresses) CHECK(address == net->weight.raw().data);
  CHECK(net->weight.device() == kFirst);
}

TEST_CASE("gradients lie in one bucket, in the same place in every step") {
  const Devices count(2);
  auto net = make_net();
  parallel::DataParallel model(net);
  std::vector<const void*> first;
  std::vector<const void*> buckets;
  for (int step = 0; step < 3; ++step) {
    sum(model(randn({8, 6}, {.dtype = float64}))).backward();
    std::vector<const void*> places;
    for (const Tensor& p : net->parameters()) {
      places.push_back(p.grad().raw().data);
      buckets.push_back(p.grad().identity()->storage->data());
      CHECK(buckets.back() == buckets.front());
      CHECK(p.grad().device() == kFirst);
    }
    if (first.empty()) first = places;
    CHECK(places == first);
    net->zero_grad();
  }
}

TEST_CASE("the devices' shares of the parameters are slices of the bucket") {
  const Devices count(3);
  auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(100, 100), nn::Linear(100, 3));
  parallel::DataParallel model(net);
  (void)model(zeros({3, 100}));
  std::vector<int64_t> shares(3);
  for (const Tensor& p : net->parameters()) {
    const auto& set = *p.identity()->replicas;
    CHECK(set.devices == model.devices());
    REQUIRE(set.cuts.size() == 4);
    CHECK(set.cuts.front() == 0);
    CHECK(set.cuts.back() == p.numel());
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(set.cuts[i] <= set.cuts[i + 1]);
      if (set.cuts[i] < p.numel()) CHECK(set.cuts[i] % 16 == 0);  // whole cache lines
      shares[i] += set.cuts[i + 1] - set.cuts[i];
    }
  }
  for (const int64_t share : shares) CHECK(std::abs(share - 10403 / 3) < 64);
}

TEST_CASE("a second backward adds, and what was handed out is not overwritten") {
  const Devices count(2);
  auto net = make_net(), alone = make_net();
  parallel::DataParallel model(net);
  const Tensor x = randn({5, 6}, {.dtype = float64});
  for (int i = 0; i < 3; ++i) {
    sum(model(x * (i + 1))).backward();
    sum((*alone)(x * (i + 1))).backward();
    check_gradients(*net, *alone);
  }
  const Tensor kept = net->parameters()[0].grad(), copy = kept.clone();
  net->zero_grad();
  sum(model(x * 10)).backward();
  CHECK(equal(kept, copy));  // who keeps a gradient keeps its memory
  CHECK_FALSE(same_memory(kept, net->parameters()[0].grad()));
}

TEST_CASE("a gradient that the user has set is added to") {
  const Devices count(2);
  auto net = make_net();
  parallel::DataParallel model(net);
  Tensor bias = net->parameters()[1];
  const Tensor mine = full({16}, 100.0, {.dtype = float64});
  bias.set_grad(mine);
  const Tensor x = randn({5, 6}, {.dtype = float64});
  sum(model(x)).backward();
  CHECK(same_memory(bias.grad(), mine));
  auto alone = make_net();
  sum((*alone)(x)).backward();
  CHECK_CLOSE(mine, alone->parameters()[1].grad() + 100, 1e-12);
}

TEST_CASE("two forwards before a backward, and a graph that is used twice") {
  const Devices count(2);
  auto net = make_net(), alone = make_net();
  parallel::DataParallel model(net);
  const Tensor a = randn({5, 6}, {.dtype = float64}), b = randn({3, 6}, {.dtype = float64});
  const Tensor loss = sum(model(a)) + sum(model(b)), expected = sum((*alone)(a)) + sum((*alone)(b));
  for (int i = 0; i < 2; ++i) {
    loss.backward({}, true);
    expected.backward({}, true);
    check_gradients(*net, *alone);
  }
}

TEST_CASE("parameters that are unused, used in one replica only, frozen, and thawed") {
  const Devices count(3);
  struct Net : nn::Module {
    Tensor forward(const Tensor& x) override {
      Tensor y = used(x);
      if (x.size(0) == 2) y = sometimes(y);  // replicas 1 and 2 of seven rows
      return y;
    }
    nn::Linear used = register_module("used", nn::Linear(2, 2));
    nn::Linear sometimes = register_module("sometimes", nn::Linear(2, 2));
    nn::Linear unused = register_module("unused", nn::Linear(2, 2));
  };
  manual_seed(1);
  auto net = std::make_shared<Net>();
  parallel::DataParallel model(net);
  const Tensor x = randn({7, 2});
  auto expected = [&] {
    net->zero_grad();
    (sum(net->forward(x.narrow(0, 0, 3))) + sum(net->forward(x.narrow(0, 3, 2))) + sum(net->forward(x.narrow(0, 5, 2))))
        .backward();
    std::vector<Tensor> gradients;
    for (const Tensor& p : net->parameters()) gradients.push_back(p.grad().defined() ? p.grad().clone() : Tensor());
    net->zero_grad();
    return gradients;
  };
  auto check_step = [&] {
    const auto gradients = expected();
    sum(model(x)).backward();
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const Tensor g = net->parameters()[i].grad();
      REQUIRE(g.defined() == gradients[i].defined());
      if (!g.defined()) continue;
      CHECK_CLOSE(g, gradients[i], 1e-5);
      CHECK(g.device() == kFirst);
    }
  };
  net->used->requires_grad_(false);
  check_step();
  CHECK_FALSE(net->used->weight.grad().defined());
  CHECK_FALSE(net->unused->weight.grad().defined());
  net->used->requires_grad_(true);  // the bucket grows
  for (int i = 0; i < 2; ++i) check_step();
  net->sometimes->requires_grad_(false);
  check_step();
  CHECK_FALSE(net->sometimes->weight.grad().defined());
  CHECK(net->used->weight.grad().defined());
}

TEST_CASE("a parameter without elements") {
  const Devices count(2);
  struct Net : nn::Module {
    Tensor forward(const Tensor& x) override { return x + sum(nothing); }
    nn::Parameter nothing = register_parameter("nothing", zeros({0, 3}));
  };
  auto net = std::make_shared<Net>();
  parallel::DataParallel model(net);
  optim::SGD optimizer(net->parameters(), {.lr = 0.1});
  sum(model(ones({4, 1}))).backward();
  CHECK(net->nothing.grad().shape() == Shape{0, 3});
  optimizer.step();
}

TEST_CASE("a tied weight, and one that is used twice") {
  const Devices count(2);
  struct Tied : nn::Module {
    Tied() {
      first = register_module("first", nn::Linear(3, 3));
      weight = register_parameter("again", first->weight);
    }
    Tensor forward(const Tensor& x) override { return linear(relu(first(first(x))), weight); }
    nn::Linear first{nullptr};
    nn::Parameter weight;
  };
  manual_seed(1);
  auto net = std::make_shared<Tied>();
  parallel::DataParallel model(net);
  CHECK(model.parameters().size() == 2);
  const Tensor x = randn({5, 3});
  sum(net->forward(x)).backward();
  const Tensor expected = net->weight.grad().clone();
  net->zero_grad();
  sum(model(x)).backward();
  CHECK_CLOSE(net->weight.grad(), expected, 1e-5);
}

TEST_CASE("hooks see the sum once, and may replace it") {
  const Devices count(4);
  auto net = make_net();
  parallel::DataParallel model(net);
  Tensor bias = net->parameters()[3];
  int before = 0, after = 0;
  const auto pre = autograd::register_hook(bias, [&](const Tensor& g) {
    ++before;
    CHECK(equal(g, full({4}, 8.0, {.dtype = float64})));
    return g * 10;
  });
  const auto post = autograd::register_post_accumulate_grad_hook(bias, [&](const Tensor&) { ++after; });
  for (int i = 1; i <= 2; ++i) {
    sum(model(randn({8, 6}, {.dtype = float64}))).backward();
    CHECK(before == i);
    CHECK(after == i);
    CHECK(equal(bias.grad(), full({4}, 80.0 * i, {.dtype = float64})));
  }
}

TEST_CASE("a user's Function runs in every replica, forward and backward") {
  struct Twice : autograd::Function<Twice> {
    static std::atomic<int>& backwards(int device) {
      static std::atomic<int> counts[2];
      return counts[device];
    }
    Tensor forward(autograd::Context& context, const Tensor& x, const Tensor& w) {
      context.save_for_backward({w});
      return x * w * 2;
    }
    std::vector<Tensor> backward(autograd::Context& context, const std::vector<Tensor>& g) {
      const Tensor w = context.saved(0);
      CHECK(w.device() == g[0].device());
      ++backwards(g[0].device().index());
      return {g[0] * w * 2, sum(g[0], 0) * 2};
    }
  };
  struct Net : nn::Module {
    Tensor forward(const Tensor& x) override { return Twice::apply(x, weight); }
    nn::Parameter weight = register_parameter("weight", ones({2}));
  };
  const Devices count(2);
  auto net = std::make_shared<Net>();
  parallel::DataParallel model(net);
  sum(model(zeros({5, 2}))).backward();
  CHECK(equal(net->weight.grad(), full({2}, 10.0)));
  CHECK(Twice::backwards(0) == 1);
  CHECK(Twice::backwards(1) == 1);
}

TEST_CASE("a backward after the wrapper is gone") {
  const Devices count(2);
  auto net = make_net(), alone = make_net();
  const Tensor x = randn({5, 6}, {.dtype = float64});
  Tensor loss;
  {
    parallel::DataParallel model(net);
    loss = sum(model(x));
  }
  loss.backward();
  sum((*alone)(x)).backward();
  check_gradients(*net, *alone);
  loss = Tensor();
  CHECK_FALSE(net->parameters()[0].identity()->replicas);
}

TEST_CASE("a backward that throws leaves nothing behind for the next") {
  const Devices count(2);
  auto net = make_net();
  parallel::DataParallel model(net);
  const Tensor x = randn({8, 6}, {.dtype = float64});
  sum(model(x)).backward();
  const Tensor expected = net->parameters()[0].grad().clone();
  const void* place = net->parameters()[0].grad().raw().data;
  net->zero_grad();
  {
    const auto handle = autograd::register_post_accumulate_grad_hook(
        net->parameters()[3], [](const Tensor&) { throw Error("the hook refuses"); });
    CHECK_ERROR(sum(model(x)).backward(), "the hook refuses");
  }
  net->zero_grad();
  sum(model(x)).backward();
  CHECK(equal(net->parameters()[0].grad(), expected));
  CHECK(net->parameters()[0].grad().raw().data == place);
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

TEST_CASE("the wrapper and the plain module in one backward") {
  const Devices count(2);
  auto net = std::make_shared<nn::LinearImpl>(3, 2);
  parallel::DataParallel model(net);
  for (int i = 0; i < 2; ++i) {
    net->zero_grad();
    (sum(model(ones({4, 3}))) + sum((*net)(ones({5, 3})))).backward();
    CHECK_CLOSE(net->weight.grad(), full({2, 3}, 9.0), 1e-6);
  }
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

TEST_CASE("a model that is moved or converted: between forward and backward an error, else it goes on") {
  const Devices count(2);
  auto net = std::make_shared<nn::LinearImpl>(3, 2);
  parallel::DataParallel model(net);
  const Tensor loss = sum(model(ones({4, 3}))), other = sum(model(ones({4, 3})));
  net->to(float64);
  CHECK_ERROR(loss.backward(), "'weight' was moved or converted after the forward", "run the forward again");
  sum(model(ones({4, 3}, {.dtype = float64}))).backward();
  CHECK_CLOSE(net->weight.grad(), full({2, 3}, 4.0, {.dtype = float64}), 1e-12);
  CHECK_ERROR(other.backward(), "'weight' was moved or converted");  // of replicas that are no longer in use
  net->zero_grad();
  net->to(Device("cpu:1"));
  CHECK_ERROR(model(ones({4, 3}, {.dtype = float64})), "'weight' is on cpu:1, but the first of the devices is cpu:0",
              "call module->to(\"cpu:0\")");
  CHECK_ERROR(model.loss(nn::MSELoss(), ones({4, 3}, {.dtype = float64}), ones({4, 2}, {.dtype = float64})),
              "'weight' is on cpu:1");
  net->to(kFirst);
  sum(model(ones({4, 3}, {.dtype = float64}))).backward();
  CHECK_CLOSE(net->weight.grad(), full({2, 3}, 4.0, {.dtype = float64}), 1e-12);
}

TEST_CASE("values that are changed, loaded, set or initialised between two forwards reach every replica") {
  const Devices count(2);
  auto net = std::make_shared<nn::LinearImpl>(1, 1, nn::LinearOptions{.bias = false});
  parallel::DataParallel model(net);
  const Tensor x = ones({4, 1});
  const NoGradGuard no_grad;
  auto check_all = [&](double value) { CHECK(equal(model(x), full({4, 1}, value))); };
  net->weight.fill_(2.0);
  check_all(2);
  net->weight.fill_(5.0);
  check_all(5);
  net->load_state_dict({{"weight", full({1, 1}, 7.0)}});
  check_all(7);
  net->weight.set_data(full({1, 1}, 8.0));
  check_all(8);
  nn::init::constant_(net->weight, 9.0);
  check_all(9);
  net->weight.data<float>()[0] = 10;
  check_all(10);
}

TEST_CASE("buffers: replica 0's writes are kept, and reach the others at the next forward") {
  const Devices count(3);
  struct Counter : nn::Module {
    Tensor forward(const Tensor& x) override {
      const NoGradGuard no_grad;
      rows.add_(x.size(0));
      return x + rows;
    }
    nn::Buffer rows = register_buffer("rows", zeros({}));
  };
  auto net = std::make_shared<Counter>();
  parallel::DataParallel model(net);
  CHECK(equal(model(zeros({7, 1})), tensor({3, 3, 3, 2, 2, 2, 2}, {.dtype = float32}).view({7, 1})));
  CHECK(equal(model(zeros({7, 1})), tensor({6, 6, 6, 5, 5, 5, 5}, {.dtype = float32}).view({7, 1})));
  CHECK(net->rows.item<float>() == 6);
  net->rows.fill_(100.0);
  CHECK(model(zeros({7, 1})).to_vector<float>().back() == 102);
  CHECK(model.phases().bytes_through_device_0 == 2 * 4 + 4 * 4);  // two copies of the buffer, four rows of output
}

TEST_CASE("buffers: what another replica wrote is gone at the next forward, also when replica 0 wrote nothing") {
  struct CountsPositive : nn::Module {
    Tensor forward(const Tensor& x) override {
      const NoGradGuard no_grad;
      if (sum(x).item<float>() > 0) seen.add_(1);
      return x + seen;
    }
    nn::Buffer seen = register_buffer("seen", zeros({}));
  };
  const Devices count(2);
  auto net = std::make_shared<CountsPositive>();
  parallel::DataParallel model(net);
  for (int i = 0; i < 3; ++i) CHECK(equal(model(tensor({-1.0, 1.0})), tensor({-1.0, 2.0})));
  parallel::DataParallel second_only(net, {.part_sizes = {0, 1}});
  for (int i = 0; i < 3; ++i) CHECK(equal(second_only(ones({2})), full({2}, 2.0)));
  CHECK(net->seen.item<float>() == 0);
}

TEST_CASE("the phases of a step") {
  const Devices count(2);
  auto net = make_net();
  parallel::DataParallel model(net);
  const Tensor x = randn({8, 6}, {.dtype = float64}), y = randint(0, 4, {8});
  model.loss(nn::CrossEntropyLoss(), x, y).backward();
  const parallel::Phases p = model.phases();
  for (const double seconds : {p.scatter, p.replicate, p.forward, p.loss, p.backward, p.reduce}) CHECK(seconds > 0);
  CHECK(p.gather == 0);
  CHECK(p.bytes_through_device_0 == 0);
  sum(model(x)).backward();
  CHECK(model.phases().gather > 0);
  CHECK(model.phases().loss == 0);
  CHECK(model.phases().bytes_through_device_0 == 2 * 4 * 4 * 8);  // four rows of output there, and gradients back
}

TEST_CASE("the phases of a step on one device") {
  const Devices count(1);
  parallel::DataParallel model(make_net());
  const Tensor x = randn({8, 6}, {.dtype = float64}), y = randint(0, 4, {8});
  auto check_phases = [&] {
    const parallel::Phases p = model.phases();
    CHECK(p.forward > 0);
    CHECK(p.backward > 0);
    for (const double seconds : {p.scatter, p.replicate, p.gather, p.loss, p.reduce}) CHECK(seconds == 0);
  };
  model.loss(nn::CrossEntropyLoss(), x, y).backward();
  check_phases();
  model.loss([](const Tensor& a, const Tensor&) { return sum(a); }, Reduction::sum, x, y).backward();
  check_phases();
  sum(model(x)).backward();
  check_phases();
}
