// Reductions and products: accuracy, every subset of dimensions, bits that do not depend on the number of threads.
#include <tandem/tests/support/test.h>

#include <cmath>
#include <limits>

#include <tandem/tensor/random.h>
#include <tandem/tensor/threads.h>

namespace tandem::test {
namespace {

// Sums of the elements that fall on each result, with loops over four dimensions.
std::vector<double> naive_sum(const Tensor& x, const std::vector<bool>& reduced) {
  const auto values = x.to_vector<double>();
  const Shape s = x.shape();
  Shape kept = s;
  for (int d = 0; d < 4; ++d)
    if (reduced[static_cast<std::size_t>(d)]) kept[d] = 1;
  std::vector<double> result(static_cast<std::size_t>(kept.numel()), 0.0);
  std::size_t n = 0;
  for (int64_t a = 0; a < s[0]; ++a)
    for (int64_t b = 0; b < s[1]; ++b)
      for (int64_t c = 0; c < s[2]; ++c)
        for (int64_t d = 0; d < s[3]; ++d) {
          const int64_t index[4] = {a, b, c, d};
          int64_t at = 0;
          for (int i = 0; i < 4; ++i) at = at * kept[i] + (kept[i] == 1 ? 0 : index[i]);
          result[static_cast<std::size_t>(at)] += values[n++];
        }
  return result;
}

void check_near(const std::vector<double>& a, const std::vector<double>& b, double tolerance) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) REQUIRE(std::abs(a[i] - b[i]) <= tolerance * (1 + std::abs(b[i])));
}

}  // namespace

TEST_CASE("sum: ten million numbers in float32") {
  const Tensor one = ones({10'000'000}), tenth = full({10'000'000}, 0.1);
  CHECK(sum(one).item<double>() == 1e7);
  const double exact = static_cast<double>(0.1F) * 1e7;
  CHECK(std::abs(sum(tenth).item<double>() / exact - 1) < 1e-6);
  CHECK(std::abs(mean(tenth).item<double>() / static_cast<double>(0.1F) - 1) < 1e-6);
  CHECK(std::abs(sum(tenth.view({10, 1'000'000}), 0)[0].item<double>() - 1.0) < 1e-6);
  CHECK(std::abs(sum(tenth.view({1'000'000, 10}), 0)[0].item<double>() / 1e5 - 1) < 1e-6);
  CHECK(std::abs(norm(one).item<double>() / std::sqrt(1e7) - 1) < 1e-6);
  CHECK(std::abs(sum(tenth.view({2, 5'000'000}).t().select(1, 0)).item<double>() / (exact / 2) - 1) < 1e-6);
  CHECK(var(one).item<double>() == 0);
}

TEST_CASE("sum: every subset of dimensions, dense and not") {
  manual_seed(1);
  for (const Shape& shape : {Shape{3, 4, 5, 6}, Shape{1, 7, 1, 40}, Shape{2, 3, 1100, 2}, Shape{2, 2, 3, 1500}})
    for (const DType dtype : {float32, float64, int64, int32, uint8}) {
      const Tensor x = (rand(shape) * 20).to(dtype);
      const Tensor variants[] = {x, x.permute({3, 1, 0, 2}), x.slice(1, 0, shape[1], 2),
                                 x.select(1, 0).unsqueeze(1).expand(shape)};
      for (const Tensor& v : variants)
        for (int subset = 1; subset < 16; ++subset) {
          std::vector<int64_t> dims;
          std::vector<bool> mask(4, false);
          for (int d = 0; d < 4; ++d)
            if (subset >> d & 1) {
              dims.push_back(d);
              mask[static_cast<std::size_t>(d)] = true;
            }
          CAPTURE(subset);
          check_near(sum(v, dims).to_vector<double>(), naive_sum(v, mask), dtype == float32 ? 1e-5 : 1e-12);
        }
    }
}

TEST_CASE("reductions: empty dimensions") {
  for (const Shape& shape : {Shape{0}, Shape{0, 3}, Shape{3, 0}, Shape{3, 2, 0}, Shape{2, 0, 3}, Shape{0, 0}}) {
    const Tensor x = zeros(shape);
    CAPTURE(shape.str());
    CHECK(sum(x).item<double>() == 0);
    CHECK(std::isnan(mean(x).item<double>()));
    CHECK(norm(x).item<double>() == 0);
    for (int d = 0; d < shape.dim(); ++d) {
      Shape expected = shape;
      expected.erase(d);
      const Tensor y = sum(x, d);
      CHECK(y.shape() == expected);
      CHECK(equal(y, zeros(expected)));
      CHECK(mean(x, d, true).dim() == shape.dim());
    }
    CHECK_ERROR(max(x), "[max]", "no elements");
    CHECK(test::contains(test::error_of([&] { (void)max(x); }), shape.str()));
    CHECK_ERROR(argmax(x), "[max]", "no elements");
  }
  CHECK_ERROR(max(zeros({2, 0}), 1), "[max]", "dimension 1", "empty");
  CHECK(max(zeros({2, 0}), 0).values.shape() == Shape{0});
  CHECK(std::isnan(var(ones({1})).item<double>()));
  CHECK(var(ones({1}), {}, 0).item<double>() == 0);
}

TEST_CASE("max, min, argmax: first of equals, NaN wins, negatives and integers") {
  const double nan = std::nan("");
  const Tensor x = tensor({{3.0, -1.0, 3.0}, {-5.0, nan, -7.0}});
  CHECK(max(x, 1).indices.to_vector<int>() == std::vector<int>{0, 1});
  CHECK(std::isnan(max(x).item<double>()));
  CHECK(std::isnan(min(x).item<double>()));
  CHECK(std::isnan(min(x, 1).values[1].item<double>()));
  const double kInf = std::numeric_limits<double>::infinity();
  CHECK(max(tensor({-kInf, -kInf})).item<double>() == -kInf);
  CHECK(max(tensor({-3, -9})).item<int>() == -3);
  CHECK(min(tensor({200, 100}, {.dtype = uint8})).item<int>() == 100);
  CHECK(argmax(tensor({{1, 5}, {5, 2}})).item<int>() == 1);
  CHECK(argmax(tensor({{1, 5}, {5, 2}}), 0).to_vector<int>() == std::vector<int>{1, 0});
  CHECK(argmax(tensor({{1, 5}, {5, 2}}).t(), -1, true).shape() == Shape{2, 1});
  CHECK(max(tensor(4.0), 0).values.item<double>() == 4);
  Tensor ties = tensor({2.0, 1.0, 2.0}).requires_grad_();
  max(ties).backward();
  CHECK(equal(ties.grad(), tensor({0.5, 0.0, 0.5})));
  ties.set_grad({});
  max(ties, 0).values.backward();
  CHECK(equal(ties.grad(), tensor({1.0, 0.0, 0.0})));
  Tensor zero = zeros({3}, {.requires_grad = true});
  norm(zero).backward();
  CHECK(equal(zero.grad(), zeros({3})));
}

TEST_CASE("reductions and losses: the number of threads changes no bit") {
  manual_seed(8);
  const int before = num_threads();
  const Tensor x = randn({300, 1700}), labels = randint(0, 1700, {300});
  std::vector<Tensor> first;
  for (const int threads : {1, 2, 3, 5}) {
    set_num_threads(threads);
    Tensor leaf = x.clone().requires_grad_();
    Tensor bias = zeros({1700}, {.requires_grad = true});
    cross_entropy(relu(leaf + bias), labels).backward();
    const std::vector<Tensor> now{sum(x),      sum(x, 0), sum(x, 1),     sum(x.t(), 0),     norm(x),
                                  var(x, 0),   max(x),    softmax(x, 0), log_softmax(x, 1), leaf.grad(),
                                  bias.grad(), exp(x),    gelu(x) * x};
    if (first.empty()) first = now;
    for (std::size_t i = 0; i < now.size(); ++i) {
      CAPTURE(i);
      CHECK(equal(now[i], first[i]));
    }
  }
  set_num_threads(before);
}

}  // namespace tandem::test
