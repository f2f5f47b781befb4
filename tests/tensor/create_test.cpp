// Factories, and reading tensors back.
#include <tandem/tests/support/test.h>

#include <limits>

#include <tandem/tensor/backend.h>

namespace tandem::test {

TEST_CASE("create: filled tensors and their types") {
  CHECK(zeros({2, 3}).dtype() == float32);
  CHECK(zeros({2, 3}).to_vector<float>() == std::vector<float>(6, 0));
  CHECK(ones({2}, {.dtype = int64}).to_vector<int64_t>() == std::vector<int64_t>{1, 1});
  CHECK(full({2}, 1.5).dtype() == float32);
  CHECK(full({2}, 7).dtype() == int64);
  CHECK(full({2}, true).dtype() == boolean);
  CHECK(full({}, 2.5, {.dtype = float16}).item<double>() == 2.5);
  CHECK(empty({3, 0, 2}).numel() == 0);
  CHECK(empty({}).numel() == 1);
  CHECK(ones({2}, {.requires_grad = true}).requires_grad());
  CHECK(equal(eye(2), tensor({{1.0, 0.0}, {0.0, 1.0}})));
  CHECK(eye(0).shape() == Shape{0, 0});
  CHECK(eye(2, {.dtype = boolean}).dtype() == boolean);
  const Tensor x = full({2, 2}, 3.0, {.dtype = float64});
  CHECK(equal(zeros_like(x), zeros({2, 2}, {.dtype = float64})));
  CHECK(equal(ones_like(x.t()), ones({2, 2}, {.dtype = float64})));
  CHECK(equal(full_like(x, 3), x));
  CHECK(rand_like(x).dtype() == float64);
  CHECK(randn_like(x).shape() == x.shape());
  CHECK(empty_like(x).dtype() == float64);
  CHECK(reinterpret_cast<std::uintptr_t>(zeros({3}).const_data<float>()) % 64 == 0);
}

TEST_CASE("create: shapes that cannot be") {
  CHECK_ERROR(zeros({2, -1}), "[Shape]", "-1", "{2, -1}", "negative");
  CHECK_ERROR(zeros({int64_t{1} << 40, int64_t{1} << 40}), "2^59");
  CHECK_ERROR(zeros({(int64_t{1} << 59) + 1}), "[Shape]", "too many elements");
  CHECK_ERROR(zeros(std::vector<int64_t>(9, 1)), "[Shape]", "9 dimensions", "at most 8");
  CHECK_ERROR(eye(-1), "negative");
  CHECK_ERROR(zeros({0, int64_t{1} << 40, int64_t{1} << 40}), "too many elements");
  CHECK(equal(zeros({0, int64_t{1} << 59}) + 1, ones({0, int64_t{1} << 59})));
}

TEST_CASE("create: nested lists") {
  CHECK(tensor(3).shape() == Shape{});
  CHECK(tensor(3).dtype() == int64);
  CHECK(tensor({1, 2}).dtype() == int64);
  CHECK(tensor({1, 2.0}).dtype() == float32);
  CHECK(tensor({true, false}).dtype() == boolean);
  CHECK(tensor({true, 2}).dtype() == int64);
  CHECK(tensor({{1}}).shape() == Shape{1, 1});
  CHECK(tensor({{{1, 2}, {3, 4}, {5, 6}}}).shape() == Shape{1, 3, 2});
  CHECK(tensor({{1, 2}, {3, 4}}).to_vector<int>() == std::vector<int>{1, 2, 3, 4});
  CHECK(tensor({}).shape() == Shape{0});
  CHECK(tensor({{}, {}}).shape() == Shape{2, 0});
  CHECK(tensor({1, 2}, {.dtype = float64}).to_vector<double>() == std::vector<double>{1, 2});
  const int64_t large = (int64_t{1} << 60) + 1;
  CHECK(tensor({large}).item<int64_t>() == large);
  CHECK(tensor({0.1}, {.dtype = float64}).item<double>() == 0.1);
  CHECK_ERROR(tensor({{1, 2}, {3}}), "[tensor]", "depth 1", "2 entries");
  CHECK_ERROR(tensor({{1, 2}, 3}), "[tensor]", "different lengths");
  CHECK_ERROR(tensor({1, {2, 3}}), "[tensor]");
  CHECK_ERROR(tensor({{{1}}, {{1, 2}}}), "[tensor]", "depth 2");
  CHECK_ERROR(tensor({1, 2}, {.requires_grad = true}), "int64");
}

TEST_CASE("create: from vectors and spans") {
  const std::vector<double> values{1.5, 2.5, 3.5, 4.5};
  CHECK(tensor(values).dtype() == float64);
  CHECK(equal(tensor(values, {.dtype = float32}), tensor({1.5, 2.5, 3.5, 4.5})));
  CHECK(from_span(std::span(values), {2, 2}).shape() == Shape{2, 2});
  CHECK(tensor(std::vector<std::int32_t>{1, 2}).dtype() == int32);
  CHECK(tensor(std::vector<float>{}).shape() == Shape{0});
  CHECK_ERROR(from_span(std::span(values), {3}), "[from_span]", "4 values", "{3}");
}

TEST_CASE("create: arange") {
  CHECK(arange(4).to_vector<int64_t>() == std::vector<int64_t>{0, 1, 2, 3});
  CHECK(arange(4).dtype() == int64);
  CHECK(arange(2.5).to_vector<float>() == std::vector<float>{0, 1, 2});
  CHECK(arange(2.5).dtype() == float32);
  CHECK(arange(1, 8, 3).to_vector<int64_t>() == std::vector<int64_t>{1, 4, 7});
  CHECK(arange(1, 7, 3).to_vector<int64_t>() == std::vector<int64_t>{1, 4});
  CHECK(arange(5, 0, -2).to_vector<int64_t>() == std::vector<int64_t>{5, 3, 1});
  CHECK(arange(0, 1, 0.25).to_vector<double>() == std::vector<double>{0, 0.25, 0.5, 0.75});
  CHECK(arange(3, 3).shape() == Shape{0});
  CHECK(arange(3, {.dtype = float64}).dtype() == float64);
  const int64_t start = int64_t{1} << 60;
  CHECK(arange(start, start + 3).to_vector<int64_t>() == std::vector<int64_t>{start, start + 1, start + 2});
  const int64_t least = std::numeric_limits<int64_t>::min(), most = std::numeric_limits<int64_t>::max();
  CHECK(arange(least, most, most).to_vector<int64_t>() == std::vector<int64_t>{least, -1, most - 1});
  CHECK(arange(most, least, least).to_vector<int64_t>() == std::vector<int64_t>{most, -1});
  CHECK_ERROR(arange(start + 1, start), "[arange]", "change its sign");  // as doubles they are equal
  CHECK_ERROR(arange(least, most), "[arange]", "too many numbers");
  CHECK_ERROR(arange(0, 5, 0), "[arange]", "step is 0");
  CHECK_ERROR(arange(0, 5, -1), "[arange]", "step -1", "0 to 5");
  CHECK_ERROR(arange(-5), "[arange]");
  CHECK_ERROR(arange(0, 1e30), "too many numbers");
}

TEST_CASE("read: item, to_vector, data") {
  CHECK(tensor({{2.5}}).item<double>() == 2.5);
  CHECK(tensor({7}).item<int>() == 7);
  CHECK(tensor(true).item<bool>());
  CHECK(tensor({1.0, 2.0, 3.0, 4.0}).view({2, 2}).t().to_vector<int64_t>() == std::vector<int64_t>{1, 3, 2, 4});
  CHECK_ERROR(tensor({1, 2}).item<int>(), "[item]", "{2}", "exactly one element");
  CHECK_ERROR(empty({0}).item<int>(), "[item]", "{0}");
  Tensor x = zeros({2});
  CHECK_ERROR(x.data<double>(), "[data]", "float32", "float64 was asked for", ".to(float64)");
  CHECK_ERROR(x.const_data<int64_t>(), "[data]", "int64");
  const std::uint32_t version = x.version();
  (void)x.const_data<float>();
  CHECK(x.version() == version);
  x.data<float>()[1] = 5;
  CHECK(x.version() == version + 1);
  x.mark_changed();
  CHECK(x.version() == version + 2);
  CHECK(x[1].item<float>() == 5);
  CHECK(x.size(-1) == 2);
  CHECK_ERROR(x.size(1), "[size]", "dimension 1", "-1 to 0");
  CHECK_ERROR(tensor(1).size(0), "[size]", "single number");
}

TEST_CASE("read: an undefined tensor") {
  Tensor x;
  CHECK_FALSE(x.defined());
  CHECK_ERROR(x.shape(), "[Tensor]", "undefined tensor", "assign");
  CHECK_ERROR(x + 1, "undefined");
  CHECK_ERROR(x.item<int>(), "undefined");
  CHECK_ERROR(cat({x}), "undefined");
}

TEST_CASE("make_view: nothing beyond the memory") {
  const Tensor x = zeros({4});
  const auto& storage = x.impl()->storage;
  CHECK(make_view(storage, 1, {3}, {1}, float32).numel() == 3);
  CHECK(make_view(storage, 0, {2, 2}, {0, 3}, float32).numel() == 4);
  CHECK_ERROR(make_view(storage, 1, {4}, {1}, float32), "[make_view]", "{4}", "4 elements");
  CHECK_ERROR(make_view(storage, 0, {4}, {1}, float64), "[make_view]", "2 elements");
  CHECK_ERROR(make_view(storage, -1, {1}, {1}, float32), "[make_view]");
  CHECK_ERROR(make_view(storage, 0, {int64_t{1} << 58}, {64}, float32), "[make_view]");
}

TEST_CASE("set_data: all handles see the new data, the gradient stays") {
  Tensor x = ones({2}, {.requires_grad = true});
  const Tensor copy = x;
  sum(x).backward();
  x.set_data(full({2}, 3.0));
  CHECK(equal(copy.detach(), full({2}, 3.0)));
  CHECK(equal(copy.grad(), ones({2})));
  CHECK(copy.requires_grad());
}

}  // namespace tandem::test
