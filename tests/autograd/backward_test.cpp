// Backward through graphs on one device: order, depth, accumulation, freeing, and the errors.
#include <tandem/tests/autograd/support.h>
#include <tandem/tests/support/test.h>

#include <cmath>

#include <tandem/autograd/engine.h>
#include <tandem/autograd/grad_mode.h>
#include <tandem/autograd/node.h>
#include <tandem/tensor/threads.h>
#include <tandem/tests/support/small_stack.h>

namespace tandem::test {
namespace {

void deep_chain(bool backward) {
  Tensor y = leaf({1});
  const Tensor x = y, t = tensor({1e-6});
  for (int i = 0; i < 100'000; ++i) y = y + y * t;
  if (backward) {
    y.backward();
    CHECK(x.grad().item<double>() == doctest::Approx(std::pow(1 + 1e-6, 100'000)).epsilon(1e-2));
  }
}

}  // namespace

// karpathy/micrograd#2: without topological order a diamond is walked once a path.
TEST_CASE("backward: sums of sums, each node once") {
  Tensor a = leaf(1.0);
  const Tensor b = a + a, c = b + b;
  c.backward();
  CHECK(a.grad().item<double>() == 4);
  Tensor x = leaf(1.0, float64);
  Tensor y = x;
  for (int i = 0; i < 30; ++i) y = y + y;
  y.backward();
  CHECK(x.grad().item<double>() == double(1 << 30));
}

// pytorch#5534: recursion over a deep graph overflows the stack, in backward and also when it is only destroyed.
TEST_CASE("backward: a chain of 100,000 operations on a small stack") {
  on_small_stack([] { deep_chain(true); });
  on_small_stack([] { deep_chain(false); });
}

// pytorch#1787: the gradient of a broadcast operand has the operand's shape.
TEST_CASE("backward: gradients of broadcast operands") {
  struct Row {
    Shape a, b;
    bool product;
  };
  for (const Row& row :
       {Row{{1}, {1, 2}, true}, {{4, 1}, {1, 4}, true}, {{1, 3}, {2, 1}, false}, {{}, {2, 3}, false}}) {
    Tensor a = full(row.a, 2.0, {.requires_grad = true}), b = full(row.b, 3.0, {.requires_grad = true});
    const Tensor y = row.product ? a * b : a + b;
    sum(y).backward();
    CHECK(a.grad().shape() == row.a);
    CHECK(b.grad().shape() == row.b);
    const double times_a = static_cast<double>(y.numel()) / static_cast<double>(a.numel());
    const double times_b = static_cast<double>(y.numel()) / static_cast<double>(b.numel());
    CHECK(equal(a.grad(), full(row.a, times_a * (row.product ? 3.0 : 1.0))));
    CHECK(equal(b.grad(), full(row.b, times_b * (row.product ? 2.0 : 1.0))));
  }
}

// ml-explore/mlx#610: reading a value in the middle of a graph, and adding a broadcast operand in place.
TEST_CASE("backward: values read between the operations") {
  Tensor x = ones({3, 3}, {.requires_grad = true});
  Tensor y = x + ones({3, 3, 3});
  CHECK(sum(y < 1.0).item<int64_t>() == 0);
  (y * y).backward(ones({3, 3, 3}));
  CHECK(equal(x.grad(), full({3, 3}, 12.0)));
}

// pytorch#20528, #28370: grad mode must hold in the threads that kernels and parallel_for use.
TEST_CASE("grad mode: holds in parallel_for and run_on_devices") {
  const Tensor x = ones({4}, {.requires_grad = true}), large = ones({300'000}, {.requires_grad = true});
  const int before = num_threads();
  set_num_threads(4);
  const std::vector<Device> devices{"cpu:0", "cpu:1", "cpu:2"};
  for (const bool enabled : {false, true}) {
    const GradModeGuard guard(enabled);
    CHECK((large * 2).requires_grad() == enabled);
    std::vector<int> seen(64, -1);
    parallel_for(64, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) seen[static_cast<std::size_t>(i)] = (x * 2).requires_grad();
    });
    for (const int s : seen) CHECK(s == enabled);
    std::vector<int> on_device(3, -1);
    run_on_devices(devices, [&](int i) { on_device[static_cast<std::size_t>(i)] = (x * 2).requires_grad(); });
    for (const int s : on_device) CHECK(s == enabled);
  }
  set_num_threads(before);
}

TEST_CASE("grad mode: guards nest and end with exceptions") {
  const Tensor x = ones({2}, {.requires_grad = true});
  CHECK(grad_enabled());
  {
    const NoGradGuard off;
    CHECK_FALSE((x + 1).requires_grad());
    {
      const GradModeGuard on(true);
      CHECK((x + 1).requires_grad());
    }
    CHECK_FALSE(grad_enabled());
  }
  try {
    const NoGradGuard off;
    throw 1;
  } catch (int) {
  }
  CHECK(grad_enabled());
}

TEST_CASE("backward: accumulates until the gradient is cleared") {
  Tensor x = leaf({1, 2, 3});
  CHECK_FALSE(x.grad().defined());
  for (int i = 1; i <= 3; ++i) {
    sum(x * x).backward();
    CHECK(equal(x.grad(), tensor({2.0, 4.0, 6.0}) * static_cast<double>(i)));
  }
  x.set_grad({});
  CHECK_FALSE(x.grad().defined());
  sum(x).backward();
  CHECK(equal(x.grad(), ones({3})));
  x.set_grad(tensor({10.0, 20.0, 30.0}));
  sum(x).backward();
  CHECK(equal(x.grad(), tensor({11.0, 21.0, 31.0})));
  CHECK_ERROR(x.set_grad(ones({2})), "[set_grad]", "{2}", "{3}");
  CHECK_ERROR(x.set_grad(ones({3}, {.dtype = float64})), "float64");
  CHECK_ERROR(ones({3}).set_grad(ones({3})), "[set_grad]", "requires_grad_()");
  CHECK(equal(x.grad(), tensor({11.0, 21.0, 31.0})));
}

TEST_CASE("backward: the graph is freed unless it is retained") {
  Tensor x = leaf({1, 2});
  const Tensor y = sum(exp(x));
  y.backward({}, true);
  y.backward();
  CHECK(allclose(x.grad(), 2 * exp(x.detach())));
  CHECK_ERROR(y.backward(), "[backward]", "the graph of 'sum' was freed by an earlier backward", "retain_graph = true");
  CHECK(allclose(x.grad(), 2 * exp(x.detach())));  // the failed one added nothing
  CHECK_ERROR(autograd::grad({y}, {x}), "freed");
}

TEST_CASE("backward: what it cannot start from") {
  Tensor x = leaf({1, 2});
  CHECK_ERROR(x.backward(), "[backward]", "{2}", "reduce it with sum() or mean()");
  CHECK_ERROR(ones({}).backward(), "no history", "requires_grad_()");
  CHECK_ERROR((x * 2).backward(ones({3})), "{3}", "{2}");
  CHECK_ERROR((x * 2).backward(ones({2}, {.dtype = float64})), "float64");
  CHECK_ERROR(autograd::backward({}), "no tensors to start from");
  const Tensor roots[] = {x * 2, x * 3};
  const Tensor one[] = {ones({2})};
  CHECK_ERROR(autograd::backward(roots, one), "1 gradients", "2 tensors");
  CHECK_ERROR(Tensor().backward(), "undefined tensor");
  CHECK_FALSE(x.grad().defined());
}

TEST_CASE("backward: several roots, also one above the other and one given twice") {
  Tensor x = leaf({1, 2});
  const Tensor y = x * 3, z = sum(y * y);
  const Tensor roots[] = {z, y, y};
  const Tensor gradients[] = {Tensor(), tensor({1.0, 1.0}), tensor({0.5, 0.0})};
  autograd::backward(roots, gradients);
  CHECK(equal(x.grad(), tensor({2 * 3.0 * 3 + 4.5, 2 * 6.0 * 3 + 3})));
  Tensor w = leaf(2.0);
  w.backward();  // a leaf is its own root
  w.backward(tensor(3.0));
  CHECK(w.grad().item<double>() == 4);
}

TEST_CASE("backward: detach and requires_grad_") {
  Tensor x = leaf({1, 2});
  const Tensor y = x * 2, d = y.detach();
  CHECK_FALSE(d.requires_grad());
  CHECK(d.is_leaf());
  CHECK_FALSE(y.is_leaf());
  CHECK(d.const_data<float>() == y.const_data<float>());
  sum(y * d).backward();
  CHECK(equal(x.grad(), 2 * d));
  CHECK_ERROR(tensor({1, 2}).requires_grad_(), "[requires_grad_]", "int64");
  CHECK_ERROR(ones({2}, {.dtype = bfloat16, .requires_grad = true}), "bfloat16");
  CHECK_ERROR(Tensor(y).requires_grad_(), "detach()");
  x.requires_grad_(false);
  CHECK_FALSE((x * 2).requires_grad());
  CHECK_NOTHROW(ones({2}).requires_grad_(false));
}

TEST_CASE("backward: integers and comparisons carry no gradient") {
  Tensor x = leaf({1.5, -2.5});
  CHECK_FALSE((x > 0).requires_grad());
  CHECK_FALSE(argmax(x).requires_grad());
  CHECK_FALSE(max(x, 0).indices.requires_grad());
  CHECK_FALSE(x.to(int64).requires_grad());
  CHECK(x.to(bfloat16).requires_grad());
  sum(x.to(bfloat16).to(float32) * 3).backward();
  CHECK(equal(x.grad(), full({2}, 3.0)));
}

TEST_CASE("backward: a leaf that is gone takes no gradient, the others do") {
  Tensor x = leaf({1, 2});
  Tensor y;
  {
    Tensor w = leaf({3, 4});
    y = sum(w * x + w);
  }
  y.backward();
  CHECK(equal(x.grad(), tensor({3.0, 4.0})));
  CHECK_NOTHROW(sum(ones({2}, {.requires_grad = true}) * 2.0).backward());
}

TEST_CASE("backward: gradients of different leaves never share memory") {
  Tensor a = leaf({1, 2}), b = leaf({3, 4});
  sum(a + b).backward();
  (a + b).backward(ones({2}));
  Tensor ga = a.grad();
  ga.mul_(10);
  CHECK(equal(b.grad(), full({2}, 2.0)));
  // Nor with a gradient that the caller gave, or parts of one.
  Tensor c = leaf({1, 2}), d = leaf({3, 4}), e = leaf({1, 2});
  Tensor given = tensor({1.0, 2.0, 3.0, 4.0});
  cat({c, d}).backward(given);
  (e + 0).backward(given.narrow(0, 0, 2));
  given.zero_();
  CHECK(equal(c.grad(), tensor({1.0, 2.0})));
  Tensor(c.grad()).zero_();
  CHECK(equal(d.grad(), tensor({3.0, 4.0})));
  CHECK(equal(e.grad(), tensor({1.0, 2.0})));
  // An expanded gradient becomes a dense one.
  Tensor f = leaf({{1, 2}, {3, 4}});
  sum(f).backward();
  CHECK(f.grad().is_contiguous());
  CHECK_NOTHROW(Tensor(f.grad()).add_(1));
}

TEST_CASE("backward: a tensor that was changed after it was saved") {
  Tensor x = leaf({1, 2});
  Tensor y = x * 2;
  const Tensor z = sum(exp(y)), u = sum(y * y);
  y.detach().add_(1);
  CHECK_ERROR(u.backward(), "[mul]", "changed in place after it was saved", "{2}", "clone()");
  z.backward();  // exp keeps its result, not its input
  Tensor w = leaf({1, 2});
  const Tensor out = sum(w * w);
  {
    const NoGradGuard no_grad;
    w.add_(1);
  }
  CHECK_ERROR(out.backward(), "[mul]");
  Tensor v = leaf({1, 2});
  const Tensor through_data = sum(sqrt(v) * v);
  v.data<float>()[0] = 4;
  CHECK_ERROR(through_data.backward(), "[mul]");
  Tensor q = leaf({1, 2});
  const Tensor kept_pointer = sum(log(q));
  q.mark_changed();
  CHECK_ERROR(kept_pointer.backward(), "[log]");
}

TEST_CASE("backward: retain_grad keeps the gradient of an intermediate result") {
  Tensor x = leaf({1, 2});
  Tensor y = x * 2;
  CHECK_FALSE(y.grad().defined());
  y.retain_grad();
  y.retain_grad();
  const Tensor z = sum(y * y);
  z.backward({}, true);
  CHECK(equal(y.grad(), tensor({4.0, 8.0})));
  z.backward();
  CHECK(equal(y.grad(), tensor({8.0, 16.0})));
  CHECK_NOTHROW(x.retain_grad());
}

TEST_CASE("grad: leaves and intermediate results, no leaf's gradient touched") {
  Tensor x = leaf({1, 2}), w = leaf({3, 4}), unused = leaf({5});
  const Tensor y = x * w, z = sum(y * y);
  const auto g = autograd::grad({z}, {x, y, w}, {.retain_graph = true});
  CHECK(equal(g[0], 2 * (x * w * w).detach()));
  CHECK(equal(g[1], 2 * y.detach()));
  CHECK(equal(g[2], 2 * (x * x * w).detach()));
  CHECK_FALSE(x.grad().defined());
  CHECK_FALSE(w.grad().defined());
  const auto same = autograd::grad({z}, {z, x, x}, {.retain_graph = true});
  CHECK(same[0].item<double>() == 1);
  CHECK(equal(same[1], same[2]));
  CHECK_ERROR(autograd::grad({z}, {x, unused}, {.retain_graph = true}), "[grad]", "input 1", "allow_unused");
  const auto partial = autograd::grad({z}, {unused, x}, {.retain_graph = true, .allow_unused = true});
  CHECK_FALSE(partial[0].defined());
  CHECK(equal(partial[1], g[0]));
  CHECK_ERROR(autograd::grad({z}, {x}, {.create_graph = true}), "create_graph is not supported", "scope");
  CHECK_ERROR(autograd::grad({z}, {ones({2})}), "does not require grad");
  const auto weighted = autograd::grad({y, y}, {x}, {.grad_outputs = {ones({2}), tensor({1.0, 0.0})}});
  CHECK(equal(weighted[0], tensor({6.0, 4.0})));
}

TEST_CASE("grad: what it returns is the caller's own") {
  Tensor a = leaf({1, 2}), b = leaf({3, 4}), given = ones({2});
  auto g = autograd::grad({a + b}, {a, b}, {.grad_outputs = {given}});
  g[0].mul_(5);
  CHECK(equal(g[1], ones({2})));
  CHECK(equal(given, ones({2})));
  auto s = autograd::grad({sum(a)}, {a});
  CHECK_NOTHROW(s[0].add_(1));
}

TEST_CASE("gradients of a 16-bit tensor with two uses are added") {
  const Tensor x = leaf({1, 2});
  const Tensor half = x.to(bfloat16);
  sum(half.to(float32) * 2 + half.to(float32)).backward();
  CHECK(equal(x.grad(), full({2}, 3.0)));
}

TEST_CASE("a leaf that is converted between forward and backward is an error") {
  Tensor w = leaf({{1, 2, 3}, {4, 5, 6}});
  const Tensor loss = sum(linear(ones({4, 3}), w));
  w.set_data(w.detach().to(float64));
  CHECK_ERROR(loss.backward(), "[linear]", "moved or converted after the forward");
  sum(linear(ones({4, 3}, {.dtype = float64}), w)).backward();
  CHECK(w.grad().dtype() == float64);
}

TEST_CASE("accumulate_grad refuses a gradient that does not fit the leaf") {
  const Tensor w = ones({2}, {.requires_grad = true});
  CHECK_ERROR(autograd::accumulate_grad(w, ones({3})), "[accumulate_grad]", "float32 {2} on cpu:0");
  CHECK_ERROR(autograd::accumulate_grad(w, ones({2}, {.dtype = float64})), "[accumulate_grad]");
  CHECK_ERROR(autograd::accumulate_grad(w, {}), "[accumulate_grad]");
  const auto hook = autograd::register_hook(w, [](const Tensor&) { return ones({3}); });
  CHECK_ERROR(autograd::accumulate_grad(w, ones({2})), "hook gave a gradient of float32 {3}", "{2}");
  CHECK_FALSE(w.grad().defined());
}

}  // namespace tandem::test
