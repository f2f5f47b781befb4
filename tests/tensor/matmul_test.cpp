// Products of matrices: all layouts, around the sizes where the kernel changes, both types.
#include <tandem/tests/support/test.h>

#include <cmath>

#include <tandem/tensor/random.h>
#include <tandem/tensor/threads.h>

namespace tandem::test {
namespace {

// By the definition, in double: x {m, k}, y {k, n}.
Tensor naive(const Tensor& x, const Tensor& y) {
  const auto a = x.to_vector<double>(), b = y.to_vector<double>();
  const auto m = static_cast<std::size_t>(x.size(0)), k = static_cast<std::size_t>(x.size(1)),
             n = static_cast<std::size_t>(y.size(1));
  std::vector<double> c(m * n, 0.0);
  for (std::size_t i = 0; i < m; ++i)
    for (std::size_t j = 0; j < n; ++j)
      for (std::size_t l = 0; l < k; ++l) c[i * n + j] += a[i * k + l] * b[l * n + j];
  return from_span(std::span<const double>(c), {x.size(0), y.size(1)});
}

// The same matrix in every layout that an operand can have.
std::vector<Tensor> layouts(const Tensor& x) {
  const int64_t m = x.size(0), n = x.size(1);
  const Tensor wide = cat({x, x, x}, 1), tall = cat({x, x}, 0);
  return {x,
          x.t().contiguous().t(),                     // column-major
          wide.narrow(1, n, n),                       // rows with a gap between them
          tall.t().contiguous().narrow(1, m, m).t(),  // columns with a gap
          stack({x, x}, -1).select(-1, 1),            // no unit stride
          stack({x, x}, 0).permute({1, 2, 0}).select(2, 0)};
}

double tolerance(DType dtype) { return dtype == float32 ? 2e-5 : 1e-12; }

}  // namespace

TEST_CASE("matmul: every layout of both operands") {
  manual_seed(3);
  const int64_t sizes[][3] = {{1, 1, 1}, {1, 5, 7}, {5, 1, 7},    {5, 7, 1},  {1, 9, 1},
                              {7, 1, 1}, {1, 1, 6}, {33, 17, 40}, {64, 64, 3}};
  for (const DType dtype : {float32, float64})
    for (const auto& [m, k, n] : sizes) {
      const Tensor a = randn({m, k}, {.dtype = dtype}), b = randn({k, n}, {.dtype = dtype});
      const Tensor expected = naive(a, b).to(dtype);
      for (const Tensor& la : layouts(a))
        for (const Tensor& lb : layouts(b)) {
          CAPTURE(la.strides().str());
          CAPTURE(lb.strides().str());
          const Tensor c = matmul(la, lb);
          CHECK(c.is_contiguous());
          CHECK(allclose(c, expected, tolerance(dtype), tolerance(dtype)));
        }
    }
  // Strides of 0: one row or column for all.
  const Tensor row = randn({1, 6}), column = randn({4, 1});
  CHECK(allclose(matmul(row.expand({3, 6}), row.expand({3, 6}).t()),
                 naive(row.expand({3, 6}), row.expand({3, 6}).t()).to(float32), 1e-5));
  CHECK(allclose(matmul(column.expand({4, 5}), row[0].narrow(0, 0, 5).unsqueeze(1)),
                 naive(column.expand({4, 5}), row[0].narrow(0, 0, 5).unsqueeze(1)).to(float32), 1e-5));
}

TEST_CASE("matmul: empty sizes and shapes that do not fit") {
  for (const DType dtype : {float32, float64}) {
    CHECK(equal(matmul(zeros({2, 0}, {.dtype = dtype}), zeros({0, 3}, {.dtype = dtype})),
                zeros({2, 3}, {.dtype = dtype})));
    CHECK(matmul(zeros({0, 2}, {.dtype = dtype}), zeros({2, 3}, {.dtype = dtype})).shape() == Shape{0, 3});
    CHECK(matmul(zeros({4, 2, 0}, {.dtype = dtype}), zeros({0, 3}, {.dtype = dtype})).shape() == Shape{4, 2, 3});
    CHECK(matmul(zeros({0}, {.dtype = dtype}), zeros({0}, {.dtype = dtype})).item<double>() == 0);
    CHECK(linear(zeros({3, 0}, {.dtype = dtype}), zeros({2, 0}, {.dtype = dtype}), ones({2}, {.dtype = dtype}))
              .to_vector<double>() == std::vector<double>(6, 1));
    CHECK(linear(zeros({2, 3, 4}, {.dtype = dtype}), zeros({0, 4}, {.dtype = dtype})).shape() == Shape{2, 3, 0});
    CHECK(linear(zeros({0, 4}, {.dtype = dtype}), zeros({2, 4}, {.dtype = dtype})).shape() == Shape{0, 2});
  }
  CHECK_ERROR(matmul(ones({2, 3}), ones({4, 5})), "[matmul]", "3 and 4", "{2, 3}", "{4, 5}");
  CHECK_ERROR(matmul(ones({3}), ones({4})), "[matmul]", "3 and 4");
  CHECK_ERROR(matmul(ones({2, 2, 3}), ones({3, 3, 4})), "[matmul]", "broadcast", "{2}", "{3}");
  CHECK_ERROR(matmul(tensor(1.0), ones({2})), "[matmul]", "vectors or matrices");
  CHECK_ERROR(linear(ones({2, 3}), ones({4, 5})), "[linear]", "5", "{2, 3}", "{4, 5}");
  CHECK_ERROR(linear(ones({2, 3}), ones({3})), "[linear]", "{out, in}", "{3}");
  CHECK_ERROR(linear(ones({2, 3}), ones({4, 3}), ones({3})), "[linear]", "bias must be {4}", "{3}");
  CHECK_ERROR(linear(ones({2, 3}), ones({4, 3}, {.dtype = float64})), "[linear]", "float32", "float64");
  CHECK_ERROR(linear(ones({2, 3}), ones({4, 3}), ones({4}, {.dtype = float64})), "[linear]", "bias is float64");
  CHECK_ERROR(linear(tensor(1.0), ones({4, 3})), "[linear]");
}

TEST_CASE("linear: 1 to 70 rows, with and without bias and ReLU, values and gradients") {
  manual_seed(5);
  constexpr int64_t in = 19, out = 23;
  for (const DType dtype : {float32, float64})
    for (int64_t rows = 1; rows <= 70; ++rows) {
      const bool with_bias = rows % 2 == 0, with_relu = rows % 3 == 0, strided = rows % 5 == 0;
      Tensor x = randn({rows, in}, {.dtype = dtype}).requires_grad_(),
             w = randn({out, in}, {.dtype = dtype}).requires_grad_();
      Tensor b = randn({out}, {.dtype = dtype}).requires_grad_();
      const Tensor input = strided ? stack({x, x}, -1).select(-1, 0) : x;
      const Tensor weight = strided ? stack({w, w}, -1).select(-1, 1) : w;
      const Tensor y = linear(input, weight, with_bias ? b : Tensor(), with_relu);
      Tensor expected = naive(x.detach(), w.detach().t());
      if (with_bias) expected = expected + b.detach().to(float64);
      if (with_relu) expected = relu(expected);
      CAPTURE(rows);
      CHECK(y.dtype() == dtype);
      CHECK(allclose(y.detach().to(float64), expected, tolerance(dtype), tolerance(dtype)));
      // Backward against products written out.
      const Tensor g = randn({rows, out}, {.dtype = dtype});
      y.backward(g);
      const Tensor dz = with_relu ? where(y.detach() > 0, g, zeros_like(g)) : g;
      CHECK(allclose(x.grad().to(float64), naive(dz, w.detach()), tolerance(dtype), 5 * tolerance(dtype)));
      CHECK(allclose(w.grad().to(float64), naive(dz.t(), x.detach()), tolerance(dtype), 5 * tolerance(dtype)));
      CHECK(b.grad().defined() == with_bias);
      if (with_bias) CHECK(allclose(b.grad(), sum(dz, 0), tolerance(dtype), 5 * tolerance(dtype)));
    }
}

TEST_CASE("linear: the same bits in every run, and on every virtual device") {
  manual_seed(6);
  set_cpu_device_count(2);
  const Tensor x = randn({64, 100}), w = randn({50, 100}), b = randn({50});
  const Tensor y = linear(x, w, b, true);
  CHECK(equal(linear(x, w, b, true), y));
  const Tensor far = linear(x.to("cpu:1"), w.to("cpu:1"), b.to("cpu:1"), true);
  CHECK(equal(far.to("cpu:0"), y));
  std::vector<Tensor> results(2);
  const std::vector<Device> devices{"cpu:0", "cpu:1"};
  for (int run = 0; run < 20; ++run) {
    run_on_devices(devices, [&](int i) {
      const Device d = devices[static_cast<std::size_t>(i)];
      results[static_cast<std::size_t>(i)] = linear(x.to(d), w.to(d), b.to(d), true) +
                                             sum(matmul(x.to(d).to(float64), w.t().to(d).to(float64))).to(float32) * 0;
    });
    for (const Tensor& r : results) CHECK(equal(r.to("cpu:0"), y));
  }
  set_cpu_device_count(1);
}

}  // namespace tandem::test
