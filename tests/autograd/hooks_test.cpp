// Hooks on gradients, post-accumulate hooks, end-of-backward callbacks, and offered destinations.
#include <tandem/tests/autograd/support.h>
#include <tandem/tests/support/test.h>

#include <vector>

#include <tandem/autograd/engine.h>
#include <tandem/autograd/grad_mode.h>
#include <tandem/autograd/node.h>

namespace tandem::test {
namespace {

using autograd::HookHandle;
using autograd::register_hook;

}  // namespace

TEST_CASE("hooks: called in order with the complete gradient, once a backward") {
  Tensor x = leaf({1, 2});
  std::vector<int> order;
  Tensor seen;
  const HookHandle first = register_hook(x, [&](const Tensor& g) {
    order.push_back(1);
    seen = g.clone();
    return Tensor();
  });
  const HookHandle second = register_hook(x, [&](const Tensor&) {
    order.push_back(2);
    return Tensor();
  });
  sum(x * x + x).backward();
  CHECK(order == std::vector<int>{1, 2});
  CHECK(equal(seen, tensor({3.0, 5.0})));
}

TEST_CASE("hooks: removed when the handle dies, kept by release") {
  Tensor x = leaf({1});
  int a = 0, b = 0, c = 0;
  HookHandle outer = register_hook(x, [&](const Tensor&) { return ++a, Tensor(); });
  {
    const HookHandle inner = register_hook(x, [&](const Tensor&) { return ++b, Tensor(); });
    register_hook(x, [&](const Tensor&) { return ++c, Tensor(); }).release();
    sum(x).backward();
  }
  sum(x).backward();
  outer.reset();
  outer.reset();
  sum(x).backward();
  CHECK(a == 2);
  CHECK(b == 1);
  CHECK(c == 3);
  HookHandle moved = register_hook(x, [&](const Tensor&) { return ++a, Tensor(); });
  HookHandle target = register_hook(x, [&](const Tensor&) { return ++b, Tensor(); });
  target = std::move(moved);  // removes the hook that the target held
  sum(x).backward();
  CHECK(a == 3);
  CHECK(b == 1);
}

TEST_CASE("hooks: a handle may outlive its tensor") {
  HookHandle handle;
  {
    Tensor x = leaf({1});
    handle = register_hook(x, [](const Tensor&) { return Tensor(); });
  }
  CHECK_NOTHROW(handle.reset());
}

TEST_CASE("hooks: what they return replaces the gradient, for leaves and others") {
  Tensor x = leaf({1, 2});
  const Tensor y = x * 3;
  const HookHandle on_y = register_hook(y, [](const Tensor& g) { return g * 2; });
  const HookHandle again = register_hook(y, [](const Tensor& g) { return g + 1; });
  const HookHandle on_x = register_hook(x, [](const Tensor& g) { return g * 10; });
  sum(y).backward();
  CHECK(equal(x.grad(), full({2}, (1 * 2 + 1) * 3 * 10.0)));
  const HookHandle wrong = register_hook(x, [](const Tensor&) { return ones({3}); });
  CHECK_ERROR(sum(x).backward(), "[leaf]", "hook", "{3}", "{2}");
  CHECK_ERROR(register_hook(ones({2}), [](const Tensor&) { return Tensor(); }), "[register_hook]",
              "does not require grad");
}

TEST_CASE("hooks: an exception passes to the caller of backward") {
  Tensor x = leaf({1});
  const Tensor y = x * 2;
  {
    const HookHandle handle = register_hook(y, [](const Tensor&) -> Tensor { throw Error("from the hook"); });
    CHECK_ERROR(sum(y).backward(), "from the hook");
  }
  CHECK_FALSE(x.grad().defined());
  sum(x * 2).backward();
  CHECK(x.grad().item<double>() == 2);
}

TEST_CASE("hooks: a hook may remove itself while it runs") {
  Tensor x = leaf({1});
  HookHandle handle;
  int calls = 0;
  handle = register_hook(x, [&](const Tensor&) {
    ++calls;
    handle.reset();
    return Tensor();
  });
  sum(x).backward();
  sum(x).backward();
  CHECK(calls == 1);
}

TEST_CASE("post-accumulate hooks: as soon as the last contribution has arrived") {
  // w2 is used last, so its gradient is complete first; w1 is used twice, and waits for both.
  Tensor w1 = leaf({1, 1}), w2 = leaf({2, 2}), x = ones({2});
  std::vector<std::string> events;
  const auto h1 = autograd::register_post_accumulate_grad_hook(w1, [&](const Tensor& t) {
    events.push_back("w1");
    CHECK(t.identity() == w1.identity());
    CHECK(equal(t.grad(), tensor({3.0, 3.0})));
  });
  const auto h2 = autograd::register_post_accumulate_grad_hook(w2, [&](const Tensor&) { events.push_back("w2"); });
  const Tensor first = w1 * x;
  const HookHandle early = register_hook(first, [&](const Tensor&) { return events.push_back("first"), Tensor(); });
  sum(first * w2 + w1).backward();
  CHECK(events == std::vector<std::string>{"w2", "first", "w1"});
  CHECK_ERROR(autograd::register_post_accumulate_grad_hook(w1 * 2, [](const Tensor&) {}),
              "leaf that requires grad, or did");
}

TEST_CASE("post-accumulate hooks: not for a leaf that no gradient reached, not within grad()") {
  Tensor x = leaf({1}), unused = leaf({1});
  int calls = 0;
  const auto a = autograd::register_post_accumulate_grad_hook(x, [&](const Tensor&) { ++calls; });
  const auto b = autograd::register_post_accumulate_grad_hook(unused, [&](const Tensor&) { ++calls; });
  (void)autograd::grad({sum(x)}, {x});
  CHECK(calls == 0);
  sum(x).backward();
  CHECK(calls == 1);
  sum(x).backward();
  CHECK(calls == 2);
}

TEST_CASE("queue_callback: at the end of the backward that is running, in order") {
  Tensor x = leaf({1, 2}), y = leaf({3, 4});
  std::vector<std::string> events;
  const HookHandle on_y = register_hook(y, [&](const Tensor&) {
    autograd::queue_callback([&] {
      events.push_back("first");
      CHECK(x.grad().defined());
      autograd::queue_callback([&] { events.push_back("third"); });
    });
    autograd::queue_callback([&] { events.push_back("second"); });
    return Tensor();
  });
  const HookHandle on_x = register_hook(x, [&](const Tensor&) { return events.push_back("x"), Tensor(); });
  sum(exp(x) * y).backward();
  CHECK(events == std::vector<std::string>{"x", "first", "second", "third"});
  CHECK_ERROR(autograd::queue_callback([] {}), "[queue_callback]", "no backward is running", "from a hook");
  const HookHandle failing = register_hook(x, [&](const Tensor&) {
    autograd::queue_callback([] { throw Error("from the callback"); });
    return Tensor();
  });
  CHECK_ERROR(sum(x).backward(), "from the callback");
}

TEST_CASE("a hook asks what the running backward does") {
  Tensor x = leaf({1, 2}), y = leaf({3, 4}), z = leaf({5});
  std::vector<bool> seen;
  const HookHandle on_y = register_hook(y, [&](const Tensor&) {
    seen = {autograd::accumulates_gradients(), autograd::reaches(x), autograd::reaches(z)};
    return Tensor();
  });
  sum(x * y).backward();
  CHECK(seen == std::vector<bool>{true, true, false});
  (void)autograd::grad({sum(y)}, {y});
  CHECK(seen == std::vector<bool>{false, false, false});
  CHECK_ERROR(autograd::accumulates_gradients(), "[accumulates_gradients]", "no backward is running");
  CHECK_ERROR(autograd::reaches(x), "[reaches]", "no backward is running");
}

TEST_CASE("hooks: a backward inside a hook inside a backward") {
  Tensor x = leaf({1, 2}), w = leaf({5});
  int inner = 0;
  bool queued_inside = false;
  const HookHandle handle = register_hook(x, [&](const Tensor& g) {
    CHECK_FALSE(grad_enabled());
    const GradModeGuard record(true);
    const HookHandle on_w = register_hook(w, [&](const Tensor&) {
      ++inner;
      autograd::queue_callback([&] { queued_inside = true; });
      return Tensor();
    });
    (w * w).backward();
    CHECK(queued_inside);  // belongs to the inner backward
    autograd::queue_callback([&] { ++inner; });
    return g * 2;
  });
  sum(x * x).backward();
  CHECK(inner == 2);
  CHECK(equal(x.grad(), tensor({4.0, 8.0})));
  CHECK(w.grad().item<double>() == 10);
}

TEST_CASE("destination: the gradient is written where the leaf asks for it") {
  Tensor x = leaf({{1, 2}, {3, 4}}), w = leaf({{1, 0}, {0, 1}}), b = leaf({0, 0});
  Tensor bucket = full({10}, 7.0);
  autograd::leaf_of("test", w).set_destination(bucket.narrow(0, 0, 4).view({2, 2}));
  autograd::leaf_of("test", b).set_destination(bucket.narrow(0, 4, 2));
  autograd::leaf_of("test", x).set_destination(bucket.narrow(0, 6, 4).view({2, 2}));
  sum(linear(exp(x), w, b)).backward();
  const float* base = bucket.const_data<float>();
  CHECK(w.grad().const_data<float>() == base);
  CHECK(b.grad().const_data<float>() == base + 4);
  CHECK(x.grad().const_data<float>() == base + 6);
  CHECK(equal(b.grad(), full({2}, 2.0)));
  const Tensor expected = exp(x.detach());
  CHECK(allclose(x.grad(), expected));
  CHECK(allclose(w.grad(), sum(expected, 0).expand({2, 2})));
  // A second backward adds, and cleared gradients are overwritten in the same place.
  sum(linear(exp(x), w, b)).backward();
  CHECK(equal(bucket.narrow(0, 4, 2), full({2}, 4.0)));
  for (Tensor t : {x, w, b}) t.set_grad({});
  CHECK_FALSE(w.grad().defined());
  const Tensor y = linear(exp(x), w, b);
  (sum(y) + sum(w) + sum(b * 3)).backward();  // several contributions
  CHECK(w.grad().const_data<float>() == base);
  CHECK(equal(b.grad(), full({2}, 5.0)));
  CHECK(allclose(w.grad(), sum(expected, 0).expand({2, 2}) + 1));
  autograd::leaf_of("test", b).set_destination({});
  b.set_grad({});
  sum(b).backward();
  CHECK(b.grad().const_data<float>() != base + 4);
  CHECK(equal(bucket.narrow(0, 4, 2), full({2}, 5.0)));
}

TEST_CASE("destination: taken as long as anybody holds what lies in it") {
  Tensor w = leaf({1, 2}), bucket = full({2}, 7.0);
  autograd::LeafNode& node = autograd::leaf_of("test", w);
  node.set_destination(bucket);
  sum(exp(w)).backward();
  const Tensor kept = w.grad(), copy = kept.clone();
  CHECK(kept.const_data<float>() == bucket.const_data<float>());
  CHECK_FALSE(node.destination().defined());
  w.set_grad({});
  CHECK_FALSE(node.destination().defined());
  sum(exp(w) * 3).backward();
  CHECK(equal(kept, copy));
  CHECK(w.grad().const_data<float>() != bucket.const_data<float>());
  const Tensor view = node.take_grad();
  CHECK_FALSE(w.grad().defined());
  {
    const Tensor given = Tensor(kept);  // not the last
  }
  CHECK_FALSE(node.destination().defined());
}

TEST_CASE("destination: taken as long as anybody holds a view of what lies in it") {
  Tensor w = leaf({1, 2}), bucket = full({2}, 7.0);
  autograd::LeafNode& node = autograd::leaf_of("test", w);
  node.set_destination(bucket);
  sum(w * 3).backward();
  {
    const Tensor kept = w.grad()[1];
    w.set_grad({});
    CHECK_FALSE(node.destination().defined());
    sum(exp(w)).backward();
    CHECK(kept.item<float>() == 3);
    w.set_grad({});
  }
  CHECK(node.destination().const_data<float>() == bucket.const_data<float>());
}

TEST_CASE("destination: a hook may return a view of what lies in it") {
  Tensor w = leaf({{1, 2}, {3, 4}}), bucket = full({2, 2}, 7.0);
  autograd::leaf_of("test", w).set_destination(bucket);
  const HookHandle handle = register_hook(w, [](const Tensor& g) { return g.t(); });
  sum(exp(w)).backward();
  CHECK(equal(w.grad(), exp(w.detach()).t()));
}

TEST_CASE("destination: a hook may keep what lies in it") {
  Tensor w = leaf({1, 2}), bucket = full({2}, 7.0), kept;
  autograd::leaf_of("test", w).set_destination(bucket);
  const HookHandle handle = register_hook(w, [&](const Tensor& g) {
    if (!kept.defined()) kept = g;
    return Tensor();
  });
  for (int i = 0; i < 2; ++i) sum(exp(w)).backward();
  CHECK(equal(kept, exp(w.detach())));
  CHECK(equal(w.grad(), exp(w.detach()) * 2));
}

TEST_CASE("accumulate_grad: the leaf keeps the tensor, but not one that a hook gave") {
  Tensor w = leaf({1, 2});
  Tensor g = full({2}, 3.0), mine = full({2}, 5.0);
  autograd::accumulate_grad(w, g);
  CHECK(w.grad().const_data<float>() == g.const_data<float>());
  w.set_grad({});
  const HookHandle handle = register_hook(w, [&](const Tensor&) { return mine; });
  autograd::accumulate_grad(w, g);
  CHECK(equal(w.grad(), mine));
  CHECK(w.grad().const_data<float>() != mine.const_data<float>());
}

TEST_CASE("accumulate_grad: the leaf does not keep what a hook keeps") {
  for (const bool whole : {true, false}) {
    Tensor w = leaf({1, 2}), kept;
    const HookHandle handle = register_hook(w, [&](const Tensor& g) {
      if (!kept.defined()) kept = whole ? g : g[0];
      return Tensor();
    });
    for (int i = 0; i < 2; ++i) autograd::accumulate_grad(w, full({2}, 3.0));
    CHECK(equal(kept, whole ? full({2}, 3.0) : full({}, 3.0)));
    CHECK(equal(w.grad(), full({2}, 6.0)));
  }
}

TEST_CASE("destination: grad() leaves it alone, and a hook may replace what lies in it") {
  Tensor w = leaf({1, 2}), bucket = full({2}, 7.0);
  autograd::leaf_of("test", w).set_destination(bucket);
  const auto g = autograd::grad({sum(exp(w))}, {w});
  CHECK(equal(bucket, full({2}, 7.0)));
  CHECK(g[0].const_data<float>() != bucket.const_data<float>());
  const HookHandle handle = register_hook(w, [](const Tensor& gradient) { return gradient * 0 + 3; });
  sum(exp(w)).backward();
  CHECK(equal(bucket, full({2}, 3.0)));
  CHECK(w.grad().const_data<float>() == bucket.const_data<float>());
}

}  // namespace tandem::test
