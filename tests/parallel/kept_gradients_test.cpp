// What users do with gradients of a DataParallel: keep them or parts of them, and replace them by views in hooks. All
// of it must come out as for the plain module.
#include <functional>
#include <mutex>

#include <tandem/parallel/on_device.h>
#include <tandem/tests/parallel/virtual_devices.h>

using namespace tandem;
using namespace tandem::test;

namespace {

struct Square : nn::Module {
  Tensor forward(const Tensor& x) override {
    if (hook_in_forward) autograd::register_hook(weight, hook_in_forward).release();
    return matmul(x, weight);
  }
  nn::Parameter weight = register_parameter("weight", ones({2, 2}));
  std::function<Tensor(const Tensor&)> hook_in_forward;
};

Tensor input() { return tensor({1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}, {.dtype = float32}).view({4, 2}); }

// The sum of the rows gives every column this gradient.
Tensor expected(double scale = 1) { return tensor({16.0, 16.0, 20.0, 20.0}, {.dtype = float32}).view({2, 2}) * scale; }

using Piece = Tensor (*)(const Tensor&);
const Piece kViews[] = {
    [](const Tensor& g) { return g.t(); },
    [](const Tensor& g) {
      return g.slice(0, 0, 1).expand({2, 2});
    },
    [](const Tensor& g) {
      return g.slice(0, 1, 2).expand({2, 2});
    },
    [](const Tensor& g) {
      return g.view({4}).view({2, 2});
    },
};

}  // namespace

TEST_CASE("a hook that returns a view of the gradient replaces it") {
  for (const int devices : {1, 2}) {
    CAPTURE(devices);
    const Devices count(devices);
    for (const Piece& view : kViews) {
      auto net = std::make_shared<Square>();
      parallel::DataParallel model(net);
      const auto handle = autograd::register_hook(net->weight, view);
      for (int i = 1; i <= 2; ++i) {
        sum(model(input())).backward();
        CHECK(equal(net->weight.grad(), view(expected()) * i));
      }
    }
  }
}

TEST_CASE("the same in a hook of each replica, which is registered inside forward") {
  for (const int devices : {1, 2}) {
    CAPTURE(devices);
    const Devices count(devices);
    for (const Piece& view : kViews) {
      auto net = std::make_shared<Square>();
      net->hook_in_forward = view;
      parallel::DataParallel model(net);
      sum(model(input())).backward();
      CHECK(equal(net->weight.grad(), view(expected())));
    }
  }
}

TEST_CASE("whoever keeps a piece of a gradient keeps its memory") {
  const Piece pieces[] = {
      [](const Tensor& g) { return g; },
      [](const Tensor& g) { return g.flatten(); },
      [](const Tensor& g) { return g.detach(); },
      [](const Tensor& g) { return g.t(); },
      [](const Tensor& g) { return g[0]; },
      [](const Tensor& g) { return parallel::on_device(g, Device("cpu:1")); },
  };
  const Devices count(2);
  for (const Piece& piece : pieces) {
    auto net = std::make_shared<Square>();
    parallel::DataParallel model(net);
    std::vector<Tensor> history;
    for (int i = 1; i <= 3; ++i) {
      sum(model(input() * i)).backward();
      history.push_back(piece(net->weight.grad()));
      net->zero_grad();
    }
    for (int i = 1; i <= 3; ++i)
      CHECK(
          equal(history[static_cast<std::size_t>(i - 1)].to(Device("cpu:0")), piece(expected(i)).to(Device("cpu:0"))));
    // Once nobody does, gradients lie in the bucket again.
    history.clear();
    sum(model(input())).backward();
    const void* place = net->weight.grad().raw().data;
    net->zero_grad();
    sum(model(input())).backward();
    CHECK(net->weight.grad().raw().data == place);
  }
}

TEST_CASE("a gradient that a hook keeps stays as it was") {
  const Piece kept_as[] = {[](const Tensor& g) { return g; }, [](const Tensor& g) { return g.view({4}); }};
  for (const int devices : {1, 2}) {
    CAPTURE(devices);
    const Devices count(devices);
    for (const Piece& keep : kept_as) {
      auto net = std::make_shared<Square>();
      parallel::DataParallel model(net);
      std::vector<Tensor> kept;
      const auto handle = autograd::register_hook(net->weight, [&](const Tensor& g) {
        kept.push_back(keep(g));
        return Tensor();
      });
      for (int i = 1; i <= 3; ++i) sum(model(input() * i)).backward();
      for (int i = 1; i <= 3; ++i) CHECK(equal(kept[static_cast<std::size_t>(i - 1)], keep(expected(i))));
      CHECK(equal(net->weight.grad(), expected(6)));
    }
  }
}

TEST_CASE("a gradient that a replica's hook keeps stays that replica's") {
  const Devices count(2);
  auto net = std::make_shared<Square>();
  std::mutex mutex;
  std::vector<Tensor> kept(2);
  net->hook_in_forward = [&](const Tensor& g) {
    const std::lock_guard lock(mutex);
    kept[static_cast<std::size_t>(g.device().index())] = g;
    return Tensor();
  };
  parallel::DataParallel model(net);
  sum(model(input())).backward();
  const Tensor first = tensor({4.0, 4.0, 6.0, 6.0}, {.dtype = float32}).view({2, 2});
  CHECK(equal(kept[0], first));
  CHECK(equal(kept[1].to(Device("cpu:0")), expected() - first));
  CHECK(equal(net->weight.grad(), expected()));
}
