// In-place operations: values, conversion, overlapping memory, and what is recorded.
#include <tandem/tests/autograd/support.h>
#include <tandem/tests/support/test.h>

#include <tandem/autograd/engine.h>
#include <tandem/autograd/grad_mode.h>

namespace tandem::test {
TEST_CASE("in place: values, returned handle, version") {
  Tensor x = tensor({1.0, 2.0, 3.0});
  const float* place = x.const_data<float>();
  const std::uint32_t version = x.version();
  CHECK(x.add_(1).identity() == x.identity());
  CHECK(equal(x, tensor({2.0, 3.0, 4.0})));
  CHECK(equal(x.sub_(tensor({1.0, 1.0, 2.0})), tensor({1.0, 2.0, 2.0})));
  CHECK(equal(x.mul_(3), tensor({3.0, 6.0, 6.0})));
  CHECK(equal(x.div_(tensor(2.0)), tensor({1.5, 3.0, 3.0})));
  CHECK(equal(x += x, tensor({3.0, 6.0, 6.0})));
  CHECK(equal(x -= tensor({1.0, 2.0, 3.0}), tensor({2.0, 4.0, 3.0})));
  CHECK(equal(x *= x, tensor({4.0, 16.0, 9.0})));
  CHECK(equal(x /= tensor({2.0, 4.0, 3.0}), tensor({2.0, 4.0, 3.0})));
  CHECK(equal(x.fill_(7), full({3}, 7.0)));
  CHECK(equal(x.zero_(), zeros({3})));
  CHECK(equal(x.copy_(tensor({1, 2, 3})), tensor({1.0, 2.0, 3.0})));
  CHECK(x.const_data<float>() == place);
  CHECK(x.version() == version + 11);
  const Tensor view = x[0];
  CHECK(view.version() == x.version());
}

TEST_CASE("in place: types within a kind are converted, others are errors") {
  Tensor i = tensor({1, 2}, {.dtype = int32}), b = tensor({true, false}), f = tensor({1.0, 2.0}), h = f.to(bfloat16);
  CHECK(equal(i.add_(tensor({10, 20})), tensor({11, 22}, {.dtype = int32})));
  CHECK(equal(f.add_(tensor({0.5, 0.5}, {.dtype = float64})), tensor({1.5, 2.5})));
  CHECK(equal(f.mul_(i), tensor({16.5, 55.0})));
  CHECK(equal(h.add_(tensor({1.0, 1.0})).to(float32), tensor({2.0, 3.0})));
  CHECK_ERROR(i.add_(tensor({0.5, 0.5})), "[add_]", "float32", "int32", ".to(float32)");
  CHECK_ERROR(i.add_(0.5), "[add_]", "float32");
  CHECK_ERROR(i.div_(2), "[div_]", "float32", "int32");
  CHECK_ERROR(b.add_(1), "[add_]", "int64", "bool");
  CHECK_ERROR(b.add_(b), "bool");
  CHECK(equal(i, tensor({11, 22}, {.dtype = int32})));
  Tensor u = tensor({1.9, -1.9, 300.0}, {.dtype = float32}), to = zeros({3}, {.dtype = uint8});
  CHECK(equal(to.copy_(u), tensor({1, 0, 255}, {.dtype = uint8})));
}

TEST_CASE("in place: shapes") {
  Tensor x = zeros({2, 3});
  CHECK(equal(x.add_(tensor({1.0, 2.0, 3.0})), tensor({{1.0, 2.0, 3.0}, {1.0, 2.0, 3.0}})));
  CHECK_ERROR(x.add_(zeros({4})), "[add_]", "{2, 3}", "{4}");
  CHECK_ERROR(Tensor(x[0]).add_(x), "[add_]", "{2, 3}", "does not fit into {3}");
  CHECK_ERROR(x.copy_(zeros({2, 2})), "[copy_]", "{2, 2}", "{2, 3}");
  CHECK_ERROR(Tensor(x[0]).copy_(x), "[copy_]", "does not fit");
  CHECK_ERROR(x.unsqueeze(0).expand({2, 2, 3}).add_(1), "[write]", "expanded view", "clone()");
  CHECK_ERROR(x.unsqueeze(0).expand({2, 2, 3}).zero_(), "[write]");
  CHECK_ERROR(x.unsqueeze(0).expand({2, 2, 3}).copy_(zeros({2, 2, 3})), "[write]");
  CHECK_ERROR(x.unsqueeze(0).expand({2, 2, 3}).data<float>(), "[write]");
  CHECK_NOTHROW(x.unsqueeze(0).expand({1, 2, 3}).add_(1));
  Tensor none = zeros({0, 3});
  CHECK_NOTHROW(none.add_(1).mul_(none).zero_());
}

TEST_CASE("in place: operands that overlap are read before they are written") {
  auto base = [] { return arange(1, 10, 1, {.dtype = float32}).view({3, 3}); };
  const Tensor x = base();
  Tensor y = base();
  CHECK(equal(y.add_(y.t()), x + x.t()));
  y = base();
  CHECK(equal(y.copy_(y.t()), x.t()));
  y = base();
  CHECK(equal(y.mul_(y[0]), x * x[0]));
  y = base();
  CHECK(equal(y.sub_(y[1]), x - x[1]));
  y = base();
  y.narrow(0, 1, 2).add_(y.narrow(0, 0, 2));
  CHECK(equal(y, cat({x.narrow(0, 0, 1), x.narrow(0, 1, 2) + x.narrow(0, 0, 2)})));
  y = base();
  y.narrow(0, 0, 2).copy_(y.narrow(0, 1, 2));
  CHECK(equal(y, cat({x.narrow(0, 1, 2), x.narrow(0, 2, 1)})));
}

TEST_CASE("in place: writing through views changes the base") {
  Tensor x = zeros({2, 3});
  x[1].fill_(5);
  x.t()[0].add_(1);
  x.slice(1, 0, 3, 2).mul_(2);
  CHECK(equal(x, tensor({{2.0, 0.0, 0.0}, {12.0, 5.0, 10.0}})));
}

TEST_CASE("in place: recorded, with the gradients of the values that were there") {
  Tensor x = leaf({1, 2}), w = leaf({3, 4});
  Tensor y = x * 2;
  y.mul_(w).add_(x).div_(w).sub_(1);  // (2xw + x) / w - 1
  CHECK(allclose(y.detach(), 2 * x.detach() + x.detach() / w.detach() - 1));
  sum(y).backward();
  CHECK(allclose(x.grad(), 2 + 1 / w.detach()));
  CHECK(allclose(w.grad(), -x.detach() / (w.detach() * w.detach())));
  Tensor z = zeros({2});  // a tensor without history takes that of what is added
  z += x;
  CHECK(z.requires_grad());
  CHECK_FALSE(z.is_leaf());
  x.set_grad({});
  sum(z * z).backward();
  CHECK(equal(x.grad(), 2 * x.detach()));
}

TEST_CASE("in place: recorded with an operand that shares memory") {
  Tensor x = leaf({{1, 2}, {3, 4}});
  Tensor y = x * 1;
  y.add_(y.t());
  CHECK(equal(y.detach(), tensor({{2.0, 5.0}, {5.0, 8.0}})));
  sum(y * tensor({{1.0, 2.0}, {3.0, 4.0}})).backward();
  CHECK(equal(x.grad(), tensor({{2.0, 5.0}, {5.0, 8.0}})));
  Tensor z = x * 1;
  z.mul_(z);
  x.set_grad({});
  sum(z).backward();
  CHECK(equal(x.grad(), 2 * x.detach()));
}

TEST_CASE("in place: results of reductions and products can be added to") {
  Tensor x = leaf({{1, 2}, {3, 4}});
  Tensor loss = sum(x);
  loss += sum(x * x);
  loss.backward();
  CHECK(equal(x.grad(), 1 + 2 * x.detach()));
  x.set_grad({});
  Tensor y = matmul(x.unsqueeze(0), x.detach());
  y += 1;
  Tensor z = linear(x.unsqueeze(0), x.detach());
  z.add_(y);
  sum(z).backward();
  CHECK(x.grad().defined());
}

TEST_CASE("in place: what cannot be recorded") {
  Tensor x = leaf({1, 2, 3});
  CHECK_ERROR(x.add_(1), "[add_]", "leaf that requires grad", "NoGradGuard");
  CHECK_ERROR(x.zero_(), "[fill_]", "leaf");
  CHECK_ERROR(x.copy_(zeros({3})), "[copy_]", "leaf");
  Tensor y = x * 2;
  CHECK_ERROR(y[0].add_(1), "[add_]", "view", "cat, stack or where");
  CHECK_ERROR(y[0].fill_(1), "[fill_]", "view");
  Tensor part = zeros({3})[0], base = zeros({3});
  CHECK_ERROR(base[0].add_(x[0]), "view");
  CHECK(equal(y.detach(), 2 * x.detach()));
  const NoGradGuard no_grad;
  CHECK_NOTHROW(x.add_(1));
  CHECK(x.is_leaf());
  CHECK(x.requires_grad());
}

TEST_CASE("in place: a view made before its base was changed is stale") {
  Tensor x = leaf({1, 2});
  Tensor y = x * 1;
  const Tensor before = y[0];
  y.add_(1);
  CHECK_ERROR(before * 2, "[mul]", "view that was made before its base was changed in place", "again");
  const Tensor after = y[0];
  CHECK_NOTHROW((after * 2).backward());
  Tensor lonely;
  {
    Tensor base = x * 1;
    lonely = base[0];
    base.add_(1);
  }
  CHECK_ERROR(lonely.add_(1), "made before its base was changed");
}

TEST_CASE("in place: a view of a tensor that gets a history later is stale, too") {
  Tensor w = leaf({2, 3});
  Tensor b = ones({2});
  const Tensor v = b[0], constant = b[1].detach();
  Tensor older;
  {
    const NoGradGuard no_grad;
    older = v.unsqueeze(0);  // a view of a stale view will be stale
  }
  b.mul_(w * 3);
  CHECK_ERROR(v * w, "[mul]", "made before its base was changed in place", "again");
  CHECK_ERROR(w + v, "[add]", "made before its base");
  CHECK_ERROR(v * 2, "[mul]", "made before its base");  // it depends on w
  CHECK_ERROR(older * 2, "[mul]", "made before its base");
  CHECK_ERROR(v.unsqueeze(0), "[unsqueeze]", "made before its base");
  CHECK_ERROR(cat({w, v.detach().unsqueeze(0), older}), "[cat]", "made before its base");
  CHECK_ERROR(Tensor(v).fill_(0), "[fill_]", "made before its base");
  CHECK_ERROR(Tensor(v).add_(1), "[add_]", "made before its base");
  CHECK_ERROR(zeros({}).copy_(v), "[copy_]", "made before its base");
  CHECK(v.item<float>() == 6);
  sum(b * constant).backward({}, true);  // a result of detach() is a constant that may change
  CHECK(equal(w.grad(), full({2}, 27.0)));
  w.set_grad({});
  sum(b[0] * w).backward();  // 3 w0 (w0 + w1)
  CHECK(equal(w.grad(), tensor({21.0, 6.0})));
  const NoGradGuard no_grad;
  CHECK((v * 2).item<float>() == 12);
  CHECK((v.detach().unsqueeze(0) * 2).item<float>() == 12);
}

TEST_CASE("in place: a stale view cannot be changed by a recorded operation when its base is gone") {
  Tensor w = leaf({2, 3});
  Tensor v;
  {
    Tensor b = ones({2});
    v = b[0];
    b.mul_(w);
  }
  CHECK_ERROR(v.add_(w[0]), "[add_]", "made before its base");
}

TEST_CASE("in place: a view made under NoGradGuard of a tensor with history") {
  Tensor x = leaf({1, 2});
  Tensor y = x * 2;
  Tensor v, row;
  {
    const NoGradGuard no_grad;
    v = y[0];
    row = x[0];
  }
  const std::uint32_t version = y.version();
  CHECK_ERROR(v.fill_(0), "[fill_]", "made under NoGradGuard", "compute a new tensor");
  CHECK_ERROR(v.add_(1), "[add_]", "made under NoGradGuard");
  CHECK_ERROR(v.copy_(zeros({})), "[copy_]", "made under NoGradGuard");
  CHECK_ERROR(v.unsqueeze(0).mul_(2), "[mul_]", "made under NoGradGuard");
  CHECK(y.version() == version);
  CHECK(equal((v * 3).detach(), tensor(6.0)));
  sum(y).backward();
  CHECK(equal(x.grad(), full({2}, 2.0)));
  CHECK_NOTHROW(row.fill_(5));  // a leaf has no history
  const NoGradGuard no_grad;
  CHECK_NOTHROW(v.fill_(7));
  CHECK(y[0].item<float>() == 7);
}

TEST_CASE("in place: what is refused changes nothing") {
  Tensor h = ones({2}, {.dtype = float16}), b = tensor({true, false}), i = tensor({1, 2});
  for (Tensor* t : {&h, &b, &i}) {
    const std::uint32_t version = t->version();
    CHECK_ERROR(t->div_(*t), "[div_]", t == &h ? "float16" : "float32", ".to(float32)");
    CHECK_ERROR(t->add_(ones({3}, {.dtype = t->dtype()})), "[add_]", "do not broadcast");
    CHECK(t->version() == version);
  }
  CHECK_ERROR(b.mul_(b), "[mul_]", "no arithmetic on bool", ".to(float32)");
  CHECK_ERROR(h.mul_(h), "[mul_]", "no arithmetic on float16");
  CHECK(b.version() == tensor({true, false}).version());
  Tensor x = leaf({1}), wide;
  wide = (x * 1).expand({3});  // the base is gone, so the view could be recorded
  CHECK_ERROR(wide.fill_(2), "[write]", "expanded view");
  CHECK_ERROR(wide.add_(2), "[write]", "expanded view");
  CHECK(wide.requires_grad());
  sum(wide).backward();
  CHECK(equal(x.grad(), tensor({3.0})));
}

TEST_CASE("in place: overwritten values lose their history") {
  Tensor x = leaf({1, 2});
  Tensor y = x * 2;
  y.fill_(3);
  CHECK_FALSE(y.requires_grad());
  Tensor z = x * 2;
  z.copy_(x.detach());
  CHECK_FALSE(z.requires_grad());
  Tensor u = zeros({2, 2});
  u.copy_(x);
  sum(u).backward();
  CHECK(equal(x.grad(), full({2}, 2.0)));
}

}  // namespace tandem::test
