// Functions with a backward of one's own, and gradcheck.
#include <tandem/autograd/function.h>
#include <tandem/tests/autograd/support.h>
#include <tandem/tests/support/test.h>

#include <tandem/autograd/engine.h>
#include <tandem/autograd/gradcheck.h>

namespace tandem::test {
namespace {

using autograd::Context;
using autograd::Function;
using Tensors = std::vector<Tensor>;

struct Cube : Function<Cube> {
  Tensor forward(Context& context, const Tensor& x) {
    context.save_for_backward({x});
    return x * x * x;
  }
  Tensors backward(Context& context, const Tensors& g) { return {g[0] * 3 * pow(context.saved(0), 2)}; }
};

// Two tensors and a number in between; sum and scaled product out.
struct SumAndProduct : Function<SumAndProduct> {
  double scale = 0;
  Tensors forward(Context& context, const Tensor& a, double factor, const Tensor& b) {
    scale = factor;
    context.save_for_backward({a, b});
    return {a + b, a * b * factor};
  }
  Tensors backward(Context& context, const Tensors& g) {
    Tensor da, db;
    if (context.needs_input_grad(0)) da = g[0] + g[1] * context.saved(1) * scale;
    if (context.needs_input_grad(1)) db = g[0] + g[1] * context.saved(0) * scale;
    return {da, db};
  }
};

struct TooFew : Function<TooFew> {
  Tensor forward(Context&, const Tensor& a, const Tensor& b) { return a + b; }
  Tensors backward(Context&, const Tensors& g) { return {g[0]}; }
};

struct WrongShape : Function<WrongShape> {
  Tensor forward(Context&, const Tensor& a) { return a * 2; }
  Tensors backward(Context&, const Tensors&) { return {ones({7})}; }
};

struct Identity : Function<Identity> {
  Tensor forward(Context&, const Tensor& a) { return a; }
  Tensors backward(Context&, const Tensors& g) { return {g[0] * 5}; }
};

struct Largest : Function<Largest> {  // a value and an index
  Tensors forward(Context&, const Tensor& a) {
    const ValuesIndices m = max(a, 0);
    return {m.values, m.indices};
  }
  Tensors backward(Context& context, const Tensors& g) {
    CHECK_ERROR(context.saved(0), "[Function]", "saved(0)", "0 tensors were saved");
    return {g[0].expand({3})};
  }
};

}  // namespace

TEST_CASE("Function: one input and output") {
  Tensor x = leaf({1, 2, -3}, float64);
  const Tensor y = Cube::apply(x);
  CHECK(y.requires_grad());
  CHECK(equal(y.detach(), tensor({1, 8, -27}, {.dtype = float64})));
  CHECK(autograd::gradcheck([](const Tensors& in) { return Cube::apply(in[0]) * in[0]; }, {x}));
  CHECK_FALSE(Cube::apply(x.detach()).requires_grad());
  const NoGradGuard no_grad;
  CHECK_FALSE(Cube::apply(x).requires_grad());
}

TEST_CASE("Function: several inputs and outputs, and arguments that are no tensors") {
  Tensor a = leaf({1, 2}, float64), b = leaf({3, 4}, float64);
  CHECK(autograd::gradcheck([](const Tensors& in) { return SumAndProduct::apply(in[0], 2.5, in[1]); }, {a, b}));
  const Tensors out = SumAndProduct::apply(a, 2.0, b.detach());
  CHECK(out.size() == 2);
  sum(out[1]).backward();  // nothing flows back to the first output
  CHECK(equal(a.grad(), tensor({6, 8}, {.dtype = float64})));
  CHECK_FALSE(b.grad().defined());
}

TEST_CASE("Function: wrong gradients") {
  Tensor a = leaf({1, 2}, float64), b = leaf({3, 4}, float64);
  CHECK_ERROR(sum(TooFew::apply(a, b)).backward(), "[Function]", "1 gradients for 2 tensor arguments");
  CHECK_ERROR(sum(WrongShape::apply(a)).backward(), "[Function]", "{7}", "{2}");
}

TEST_CASE("Function: an argument that is returned keeps its own history") {
  Tensor a = leaf({1, 2}, float64);
  const Tensor y = Identity::apply(a);
  CHECK(a.is_leaf());
  sum(y + a).backward();
  CHECK(equal(a.grad(), full({2}, 6.0, {.dtype = float64})));
}

TEST_CASE("Function: an index among the results has no gradient") {
  Tensor a = leaf({1, 5, 3}, float64);
  const Tensors out = Largest::apply(a);
  CHECK(out[0].requires_grad());
  CHECK_FALSE(out[1].requires_grad());
  CHECK(out[1].item<int64_t>() == 1);
  out[0].backward();
  CHECK(equal(a.grad(), ones({3}, {.dtype = float64})));
}

TEST_CASE("Function: saved tensors that changed, and a second backward") {
  Tensor a = leaf({1, 2}, float64);
  Tensor x = a * 1.0;
  const Tensor y = sum(Cube::apply(x));
  x.detach().zero_();
  CHECK_ERROR(y.backward(), "[Function]", "changed in place");
  const Tensor z = sum(Cube::apply(a));
  z.backward();
  CHECK_ERROR(z.backward(), "freed");
}

TEST_CASE("gradcheck: finds a wrong derivative and refuses what it cannot check") {
  struct Wrong : Function<Wrong> {
    Tensor forward(Context&, const Tensor& a) { return a * a; }
    Tensors backward(Context&, const Tensors& g) { return {g[0] * 2}; }
  };
  Tensor x = leaf({1, 2}, float64);
  auto wrong = [](const Tensors& in) { return Wrong::apply(in[0]); };
  CHECK_ERROR(autograd::gradcheck(wrong, {x}), "[gradcheck]", "output 0, element 1", "input 0, element 1",
              "is 2 by backward", "4");
  auto square = [](const Tensors& in) { return in[0] * in[0]; };
  CHECK_ERROR(autograd::gradcheck(square, {x.detach()}), "no input requires grad");
  CHECK_ERROR(autograd::gradcheck(square, {ones({2}, {.requires_grad = true})}), "float64", "float32");
  CHECK(autograd::gradcheck(square, {x}));
  auto detached = [](const Tensors& in) { return in[0].detach() * 2; };
  CHECK_ERROR(autograd::gradcheck(detached, {x}), "is 0 by backward");
  CHECK(equal(x.detach(), tensor({1, 2}, {.dtype = float64})));
}

}  // namespace tandem::test
