// Graphs that span devices, and threads that call backward at the same time.
#include <tandem/tests/support/test.h>

#include <thread>

#include <tandem/autograd/engine.h>
#include <tandem/autograd/function.h>
#include <tandem/autograd/grad_mode.h>
#include <tandem/tensor/random.h>

namespace tandem::test {
namespace {

struct DeviceCount {
  explicit DeviceCount(int count) { set_cpu_device_count(count); }
  ~DeviceCount() { set_cpu_device_count(1); }
};

// Work on three devices that meets again on the first.
Tensor spread(const Tensor& x, const Tensor& w) {
  std::vector<Tensor> parts;
  int i = 0;
  for (const char* name : {"cpu:0", "cpu:1", "cpu:2"}) {
    const Device device(name);
    const Tensor part = x.narrow(0, 4 * i++, 4).to(device), weight = w.to(device);
    parts.push_back(tanh(matmul(part, weight) + part * weight[0]).to("cpu:0"));
  }
  return sum(cat(parts) * 0.125);
}

struct Failing : autograd::Function<Failing> {
  Tensor forward(autograd::Context&, const Tensor& a) { return a * 2; }
  std::vector<Tensor> backward(autograd::Context&, const std::vector<Tensor>&) { fail("Failing", "on purpose"); }
};

}  // namespace

TEST_CASE("devices: a graph over three gives the bits of one, in 50 runs") {
  const DeviceCount devices(3);
  manual_seed(3);
  Tensor x = randn({12, 8}, {.requires_grad = true}), w = randn({8, 8}, {.requires_grad = true});
  Tensor first_x, first_w;
  for (int run = 0; run < 50; ++run) {
    x.set_grad({});
    w.set_grad({});
    spread(x, w).backward();
    if (run == 0) {
      first_x = x.grad();
      first_w = w.grad();
      CHECK(first_w.device() == Device("cpu:0"));
    } else {
      CHECK(equal(x.grad(), first_x));
      CHECK(equal(w.grad(), first_w));
    }
  }
  Tensor y = x.detach().clone().requires_grad_();
  const Tensor one = sum(tanh(matmul(y, w) + y * w[0]) * 0.125);
  one.backward();
  CHECK_CLOSE(y.grad(), first_x, 1e-5);
}

TEST_CASE("devices: leaves on each, and a gradient that arrives from another device") {
  const DeviceCount devices(3);
  std::vector<Tensor> leaves;
  Tensor total = zeros({});
  for (const char* name : {"cpu:0", "cpu:1", "cpu:2"}) {
    leaves.push_back(ones({3}, {.device = name, .requires_grad = true}));
    total = total + sum(leaves.back() * 2.0).to("cpu:0");
  }
  total.backward();
  for (const Tensor& leaf : leaves) {
    CHECK(leaf.grad().device() == leaf.device());
    CHECK(equal(leaf.grad(), full({3}, 2.0, {.device = leaf.device()})));
  }
  // A root on the last device, and none of the work on the first.
  sum(leaves[2] * leaves[1].to("cpu:2")).backward();
  CHECK(equal(leaves[1].grad().to("cpu:0"), full({3}, 3.0)));
}

TEST_CASE("devices: an exception in a worker reaches the caller, and the next backward works") {
  const DeviceCount devices(3);
  Tensor x = ones({12, 8}, {.requires_grad = true}), w = ones({8, 8}, {.requires_grad = true});
  for (int run = 0; run < 20; ++run) {
    const Tensor y = spread(x, w) + sum(Failing::apply(x.to("cpu:2"))).to("cpu:0");
    CHECK_ERROR(y.backward(), "[Failing]", "on purpose");
  }
  x.set_grad({});
  spread(x, w).backward();
  CHECK(x.grad().defined());
}

TEST_CASE("devices: hooks run without recording, and may run a backward of their own") {
  const DeviceCount devices(3);
  Tensor x = ones({4}, {.requires_grad = true}), inner = ones({4}, {.device = "cpu:1", .requires_grad = true});
  const Tensor far = x.to("cpu:1") * 3.0;
  const auto handle = autograd::register_hook(far, [&](const Tensor& g) {
    CHECK_FALSE(grad_enabled());
    const GradModeGuard record(true);
    sum(inner.to("cpu:2") * inner.to("cpu:0").to("cpu:2")).backward();  // spans three devices again
    return g * 2;
  });
  (sum(far).to("cpu:0") + sum(x)).backward();
  CHECK(equal(x.grad(), full({4}, 7.0)));
  CHECK(equal(inner.grad().to("cpu:0"), full({4}, 2.0)));
}

TEST_CASE("devices: callbacks run on the thread that called backward") {
  const DeviceCount devices(2);
  Tensor x = ones({2}, {.device = "cpu:1", .requires_grad = true});
  std::thread::id hook_thread, callback_thread;
  const auto handle = autograd::register_hook(x, [&](const Tensor&) {
    hook_thread = std::this_thread::get_id();
    autograd::queue_callback([&] { callback_thread = std::this_thread::get_id(); });
    return Tensor();
  });
  const Tensor y = sum(x.to("cpu:0") * 2) + sum(x * 2).to("cpu:0");
  y.backward();
  CHECK(callback_thread == std::this_thread::get_id());
}

TEST_CASE("devices: mixing them in an operation is an error that names both") {
  const DeviceCount devices(2);
  const Tensor a = ones({2}), b = ones({2}, {.device = "cpu:1"});
  const char* both[] = {"cpu:0", "cpu:1"};
  CHECK_ERROR(a + b, "[add]", both[0], both[1], ".to(");
  CHECK_ERROR(a == b, both[0], both[1]);
  CHECK_ERROR(matmul(a, b), "[matmul]", both[0], both[1]);
  CHECK_ERROR(linear(ones({1, 2}), ones({2, 2}, {.device = "cpu:1"})), "[linear]", both[0], both[1]);
  CHECK_ERROR(cat({a, b}), "[cat]", both[0], both[1]);
  CHECK_ERROR(where(a > 0, b, b), "[where]", both[0], both[1]);
  CHECK_ERROR(index_select(a, 0, zeros({1}, {.dtype = int64, .device = "cpu:1"})), "[index_select]", both[0], both[1]);
  CHECK_ERROR(Tensor(a).add_(b), "[add_]", both[0], both[1]);
  CHECK_ERROR(Tensor(a).requires_grad_().set_grad(b), "[set_grad]", both[0], both[1]);
  CHECK_ERROR(sum(Tensor(a).requires_grad_() * 1).backward(ones({}, {.device = "cpu:1"})), "[backward]", both[1]);
  CHECK(equal(ones({2}).mul_(2).copy_(b), b.to("cpu:0")));  // a copy crosses devices
}

TEST_CASE("threads: backward at the same time over graphs that share leaves") {
  Tensor w = ones({64}, {.dtype = float64, .requires_grad = true});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) sum(w * 2.0).backward();
    });
  for (std::thread& t : threads) t.join();
  CHECK(equal(w.grad(), full({64}, 800.0, {.dtype = float64})));
}

TEST_CASE("threads: each has its own grad mode") {
  const NoGradGuard no_grad;
  bool recorded = false;
  std::thread([&] { recorded = (ones({1}, {.requires_grad = true}) * 2).requires_grad(); }).join();
  CHECK(recorded);
}

}  // namespace tandem::test
