// Reductions on a CUDA device against the CPU's, in sizes that make it cut them into pieces.
#include <tandem/tests/cuda/cuda_device.h>
#include <tandem/tests/support/test.h>

#include <cmath>
#include <limits>

#include <tandem/autograd/functions.h>
#include <tandem/tensor/create.h>

namespace tandem {
namespace {

using test::kCuda;

// The same view of the same values on both devices, reduced.
template <class View>
void compare(const Tensor& values, const View& view, const Dims& dims) {
  const Tensor here = view(values), there = view(values.to(kCuda));
  INFO(here.shape().str(), " of type ", std::string(name(here.dtype())));
  CHECK_CLOSE(sum(there, dims).to("cpu"), sum(here, dims), 1e-5);
  if (is_real(here.dtype())) CHECK_CLOSE(norm(there, dims).to("cpu"), norm(here, dims), 1e-5);
}

Tensor as_it_is(const Tensor& x) { return x; }

TEST_CASE("cuda: sums of columns, rows and all, in pieces and alone") {
  for (const DType dtype : {float32, float64}) {
    const auto values = [&](const Shape& shape) { return rand(shape, {.dtype = dtype}) - 0.25; };
    for (const Shape& shape : {Shape{1, 1}, {7, 3}, {256, 33}, {257, 32}, {1000, 65}, {70000, 3}}) {
      compare(values(shape), as_it_is, 0);
      compare(values(shape), as_it_is, 1);
      compare(values(shape), as_it_is, {});
      compare(
          values(shape), [](const Tensor& x) { return x.t(); }, 0);
    }
    compare(values({3, 300, 40}), as_it_is, 1);
    compare(values({3, 300, 40}), as_it_is, {0, 2});
    compare(values({3, 300, 40}), [](const Tensor& x) { return x.permute({1, 2, 0}); }, {0, 2});
    compare(values({5, 9000}), as_it_is, 1);
    compare(
        values({40, 1}),
        [](const Tensor& x) {
          return x.expand({40, 500});
        },
        1);
    compare(
        values({1, 40}),
        [](const Tensor& x) {
          return x.expand({500, 40});
        },
        0);
  }
}

TEST_CASE("cuda: sums of integers are exact") {
  const Tensor x = arange(100000) * 3000000007 - 12345;
  CHECK(sum(x.to(kCuda)).item<int64_t>() == sum(x).item<int64_t>());
  const Tensor rows = x.view({500, 200});
  CHECK(equal(sum(rows.to(kCuda), 0).to("cpu"), sum(rows, 0)));
  CHECK(equal(sum(rows.to(kCuda), 1).to("cpu"), sum(rows, 1)));
  CHECK(sum(full({1000}, 255, {.dtype = uint8, .device = kCuda})).item<int64_t>() == 255000);
  CHECK(sum(full({70}, true, {.device = kCuda})).item<int64_t>() == 70);
}

TEST_CASE("cuda: reductions of nothing") {
  CHECK(sum(zeros({0}, {.device = kCuda})).item<float>() == 0);
  CHECK(sum(zeros({0, 3}, {.device = kCuda}), 0).to_vector<float>() == std::vector<float>{0, 0, 0});
  CHECK(sum(zeros({3, 0}, {.device = kCuda}), 1).to_vector<float>() == std::vector<float>{0, 0, 0});
  CHECK(sum(zeros({0, 3}, {.device = kCuda}), 1).shape() == Shape{0});
}

TEST_CASE("cuda: extreme values of every type, and where they first stand") {
  for (const DType dtype : {float32, float64, int64, int32, uint8}) {
    for (const Shape& shape : {Shape{1, 1}, {4, 10}, {3, 20000}, {20000, 3}, {5000, 40}}) {
      const Tensor x = (rand(shape) * 200).to(dtype), y = x.to(kCuda);
      CHECK(equal(max(y).to("cpu"), max(x)));
      CHECK(equal(min(y).to("cpu"), min(x)));
      CHECK(equal(argmax(y).to("cpu"), argmax(x)));
      for (const int64_t dim : {0, 1}) {
        const ValuesIndices most = max(x, dim), least = min(x, dim), most_there = max(y, dim),
                            least_there = min(y, dim);
        CHECK(equal(most_there.values.to("cpu"), most.values));
        CHECK(equal(most_there.indices.to("cpu"), most.indices));
        CHECK(equal(least_there.values.to("cpu"), least.values));
        CHECK(equal(least_there.indices.to("cpu"), least.indices));
      }
    }
  }
}

TEST_CASE("cuda: NaN is an extreme value, the first of them") {
  for (const int64_t n : {10, 1000, 40000}) {
    const Tensor x = arange(n, {.dtype = float32});
    for (const int64_t i : {n / 2, n - 1}) x[i].fill_(std::numeric_limits<float>::quiet_NaN());
    const Tensor y = x.to(kCuda);
    CHECK(std::isnan(max(y).item<float>()));
    CHECK(std::isnan(min(y).item<float>()));
    CHECK(argmax(y).item<int64_t>() == n / 2);
    CHECK(min(y, 0).indices.item<int64_t>() == n / 2);
    CHECK(std::isnan(sum(y).item<float>()));
  }
}

TEST_CASE("cuda: the same sum has the same bits every time") {
  const Tensor x = randn({300, 1000}).to(kCuda);
  const Tensor all = sum(x), columns = sum(x, 0), rows = sum(x, 1);
  for (int i = 0; i < 3; ++i) {
    CHECK(equal(sum(x), all));
    CHECK(equal(sum(x, 0), columns));
    CHECK(equal(sum(x, 1), rows));
  }
}

}  // namespace
}  // namespace tandem
