// Every row of the table of operations, in every mode. A failure prints the row, the kind of sizes, and the seed.
#include <tandem/tests/autograd/op_cases.h>
#include <tandem/tests/support/test.h>

#include <algorithm>
#include <cmath>

#include <tandem/autograd/engine.h>
#include <tandem/autograd/grad_mode.h>
#include <tandem/autograd/gradcheck.h>
#include <tandem/tensor/cuda.h>

namespace tandem::test {
namespace {

constexpr std::uint64_t kSeeds = 12;

std::vector<Array> draw_arrays(Sizes& sizes, const Example& example) {
  std::vector<Array> arrays;
  for (const Argument& argument : example.arguments) {
    Array a(argument.shape);
    for (double& v : a.values) v = sizes.real(argument.low, argument.high);
    arrays.push_back(std::move(a));
  }
  return arrays;
}

std::vector<Tensor> tensors(const std::vector<Array>& arrays, DType dtype = float64, Device device = {},
                            bool requires_grad = true) {
  std::vector<Tensor> result;
  for (const Array& a : arrays) {
    Tensor t = from_values(a.values, a.shape, device).to(dtype);
    result.push_back(requires_grad ? t.requires_grad_() : t);
  }
  return result;
}

// Output, and the gradients of all inputs for an output gradient that depends on the position.
std::vector<Tensor> output_and_gradients(const Example& example, const std::vector<Tensor>& inputs,
                                         const std::vector<Tensor>& leaves) {
  const Tensor y = example.function(inputs);
  std::vector<Tensor> results{y.detach()};
  if (!y.requires_grad()) return results;
  Tensor g = (arange(y.numel(), {.dtype = float64}) * 0.25 + 1.0).view(y.shape()).to(y.dtype()).to(y.device());
  for (const Tensor& leaf : autograd::grad({y}, leaves, {.grad_outputs = {g}, .allow_unused = true}))
    results.push_back(leaf);
  return results;
}

bool same(const std::vector<Tensor>& a, const std::vector<Tensor>& b, double tolerance) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].defined() != b[i].defined()) return false;
    if (!a[i].defined()) continue;
    const auto x = a[i].to_vector<double>(), y = b[i].to_vector<double>();
    if (a[i].shape() != b[i].shape()) return false;
    for (std::size_t k = 0; k < x.size(); ++k)
      if (!(std::isnan(x[k]) && std::isnan(y[k])) && x[k] != y[k] &&
          !(std::abs(x[k] - y[k]) <= tolerance * (1 + std::abs(y[k]))))
        return false;
  }
  return true;
}

// Calls body(example, arrays) for draws of every row.
template <class Body>
void for_each_example(std::initializer_list<Sizes::Kind> kinds, std::uint64_t seeds, const Body& body) {
  set_cpu_device_count(2);
  for (const OpCase& c : op_cases())
    for (const Sizes::Kind kind : kinds)
      for (std::uint64_t seed = 1; seed <= (kind == Sizes::ones ? seeds / 3 : seeds); ++seed) {
        Sizes sizes(seed, kind);
        const Example example = c.make(sizes);
        const std::vector<Array> arrays = draw_arrays(sizes, example);
        std::string shapes;
        for (const Array& a : arrays) shapes += a.shape.str() + " ";
        CAPTURE(c.name);
        CAPTURE(shapes);
        CAPTURE(static_cast<int>(kind));
        CAPTURE(seed);
        try {
          body(example, arrays);
        } catch (const std::exception& e) {
          FAIL_CHECK(std::string(e.what()));
        }
      }
  set_cpu_device_count(1);
}

// The variance of one element and the mean of none are NaN; differences say nothing there.
bool finite(const Array& a) {
  return std::all_of(a.values.begin(), a.values.end(), [](double v) { return std::isfinite(v); });
}

}  // namespace

TEST_CASE("op_cases: every differentiable function has a row") {
  std::vector<std::string> listed = kStructuredOps;
#define X(op, ...) listed.push_back(#op);
  TANDEM_UNARY_OPS(X)
  TANDEM_BINARY_OPS(X)
  TANDEM_TERNARY_OPS(X)
#undef X
  std::vector<std::string> rows;
  for (const OpCase& c : op_cases()) rows.push_back(c.name);
  for (const std::string& name : listed) {
    CAPTURE(name);
    CHECK(std::find(rows.begin(), rows.end(), name) != rows.end());
  }
  for (const std::string& name : rows) {
    CAPTURE(name);
    CHECK(std::find(listed.begin(), listed.end(), name) != listed.end());
  }
}

TEST_CASE("op_cases: values equal the naive reference") {
  for_each_example({Sizes::any, Sizes::ones, Sizes::with_empty}, 40, [](const Example& example, const auto& arrays) {
    const Array expected = example.reference(arrays);
    const Tensor y = example.function(tensors(arrays));
    CHECK(y.shape() == expected.shape);
    CHECK(y.dtype() == float64);
    CHECK(same({y}, {from_values(expected.values, expected.shape)}, 1e-6));  // to_dtype passes through float32
  });
}

TEST_CASE("op_cases: gradients equal differences") {
  for_each_example({Sizes::any, Sizes::ones}, kSeeds, [](const Example& example, const auto& arrays) {
    if (!finite(example.reference(arrays))) return;
    if (example.arguments.empty()) return;
    CHECK(autograd::gradcheck([&](const std::vector<Tensor>& in) { return example.function(in); }, tensors(arrays),
                              {.eps = example.step, .atol = example.tolerance}));
  });
}

TEST_CASE("op_cases: empty and single sizes go forward and back") {
  for_each_example({Sizes::with_empty, Sizes::ones}, kSeeds, [](const Example& example, const auto& arrays) {
    const std::vector<Tensor> inputs = tensors(arrays);
    const Tensor y = example.function(inputs);
    CHECK(y.requires_grad());
    sum(y).backward();
    for (const Tensor& x : inputs)
      if (x.grad().defined()) CHECK(x.grad().shape() == x.shape());
  });
}

TEST_CASE("op_cases: float32 agrees with float64") {
  for_each_example({Sizes::any}, kSeeds, [](const Example& example, const auto& arrays) {
    std::vector<Array> rounded = arrays;  // the same numbers in both types
    for (Array& a : rounded)
      for (double& v : a.values) v = static_cast<float>(v);
    const auto in64 = tensors(rounded), in32 = tensors(rounded, float32);
    const auto y64 = output_and_gradients(example, in64, in64), y32 = output_and_gradients(example, in32, in32);
    CHECK(y32[0].dtype() == float32);
    CHECK(same(y32, y64, 2e-4));
  });
}

TEST_CASE("op_cases: a second device gives the same bits, on that device") {
  for_each_example({Sizes::any, Sizes::with_empty}, kSeeds, [](const Example& example, const auto& arrays) {
    for (const DType dtype : {float32, float64}) {
      const auto in0 = tensors(arrays, dtype, "cpu:0"), in1 = tensors(arrays, dtype, "cpu:1");
      const auto y0 = output_and_gradients(example, in0, in0), y1 = output_and_gradients(example, in1, in1);
      CHECK(same(y1, y0, 0));
      for (const Tensor& y : y1)
        if (y.defined()) CHECK(y.device() == Device("cpu:1"));
    }
  });
}

TEST_CASE("op_cases: inputs with other strides give the same") {
  for_each_example({Sizes::any, Sizes::with_empty}, kSeeds, [](const Example& example, const auto& arrays) {
    for (const DType dtype : {float32, float64}) {
      const auto leaves = tensors(arrays, dtype);
      const auto expected = output_and_gradients(example, leaves, leaves);
      std::vector<Tensor> apart, reversed, repeated, repeated_copy;
      for (const Tensor& x : leaves) {
        apart.push_back(stack({x, x * 0.0}, -1).select(-1, 0));  // strides doubled
        Shape order = x.shape();
        for (int i = 0; i < order.dim(); ++i) order[i] = order.dim() - 1 - i;
        reversed.push_back(x.permute(order).clone().permute(order));  // column-major
        // Strides of 0: the first row stands for all.
        const bool rows = x.dim() > 0 && x.size(0) > 1;
        auto repeat = [&] { return rows ? x.narrow(0, 0, 1).expand(x.shape()) : x; };
        repeated.push_back(repeat());
        repeated_copy.push_back(repeat().clone());
      }
      CHECK(same(output_and_gradients(example, apart, leaves), expected, dtype == float32 ? 1e-5 : 1e-12));
      CHECK(same(output_and_gradients(example, reversed, leaves), expected, dtype == float32 ? 1e-5 : 1e-12));
      CHECK(same(output_and_gradients(example, repeated, leaves), output_and_gradients(example, repeated_copy, leaves),
                 dtype == float32 ? 1e-4 : 1e-10));
    }
  });
}

TEST_CASE("op_cases: nothing is recorded without grad, and inputs stay as they were") {
  for_each_example({Sizes::any}, 3, [](const Example& example, const auto& arrays) {
    const auto inputs = tensors(arrays);
    {
      const NoGradGuard no_grad;
      CHECK_FALSE(example.function(inputs).requires_grad());
    }
    sum(example.function(inputs)).backward();
    for (std::size_t i = 0; i < inputs.size(); ++i)
      CHECK(same({inputs[i].detach()}, {from_values(arrays[i].values, arrays[i].shape)}, 0));
  });
}

// Where there is a CUDA device, or the tests' double of one.
TEST_CASE("op_cases: a CUDA device gives the CPU's values, on that device" * doctest::skip(!cuda::is_available())) {
  for_each_example({Sizes::any, Sizes::ones, Sizes::with_empty}, kSeeds,
                   [](const Example& example, const auto& arrays) {
                     for (const DType dtype : {float32, float64}) {
                       const double tolerance = dtype == float32 ? 2e-5 : 1e-10;
                       const auto here = tensors(arrays, dtype), there = tensors(arrays, dtype, "cuda:0");
                       const auto expected = output_and_gradients(example, here, here);
                       const auto y = output_and_gradients(example, there, there);
                       CHECK(same(y, expected, tolerance));
                       for (const Tensor& t : y)
                         if (t.defined()) CHECK(t.device() == Device("cuda:0"));
                       std::vector<Tensor> reversed;
                       for (const Tensor& x : there) {
                         Shape order = x.shape();
                         for (int i = 0; i < order.dim(); ++i) order[i] = order.dim() - 1 - i;
                         reversed.push_back(x.permute(order).clone().permute(order));  // column-major
                       }
                       CHECK(same(output_and_gradients(example, reversed, there), expected, tolerance));
                     }
                   });
}

}  // namespace tandem::test
