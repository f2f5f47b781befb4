// Views: shared storage, strides, and the errors. Values and gradients are rows of tests/autograd/op_cases_views.cpp.
#include <tandem/tests/support/test.h>

#include <limits>

namespace tandem::test {
namespace {
Tensor counting(const Shape& shape) { return arange(shape.numel(), {.dtype = float32}).view(shape); }
}  // namespace

TEST_CASE("views: share storage, with these strides") {
  const Tensor x = counting({2, 3, 4});
  struct Row {
    Tensor view;
    Shape shape, strides;
    int64_t offset;
  };
  const Row rows[] = {
      {x.view({6, 4}), {6, 4}, {4, 1}, 0},
      {x.reshape({-1}), {24}, {1}, 0},
      {x.flatten(1), {2, 12}, {12, 1}, 0},
      {x.transpose(0, 2), {4, 3, 2}, {1, 4, 12}, 0},
      {x.permute({2, 0, -2}), {4, 2, 3}, {1, 12, 4}, 0},
      {x.narrow(1, 1, 2), {2, 2, 4}, {12, 4, 1}, 4},
      {x.narrow(-1, -3, 2), {2, 3, 2}, {12, 4, 1}, 1},
      {x.slice(2, 1, 4, 2), {2, 3, 2}, {12, 4, 2}, 1},
      {x.slice(2, -2, 100), {2, 3, 2}, {12, 4, 1}, 2},
      {x.select(1, 2), {2, 4}, {12, 1}, 8},
      {x[-1], {3, 4}, {4, 1}, 12},
      {x.unsqueeze(0).expand({5, 2, 3, 4}), {5, 2, 3, 4}, {0, 12, 4, 1}, 0},
      {x.chunk(2, 2)[1], {2, 3, 2}, {12, 4, 1}, 2},
      {x.split(2, 1)[1], {2, 1, 4}, {12, 4, 1}, 8},
      {x.split({1, 0, 2}, 1)[2], {2, 2, 4}, {12, 4, 1}, 4},
      {x.detach(), {2, 3, 4}, {12, 4, 1}, 0},
      {x.narrow(1, 0, 1).squeeze(1), {2, 4}, {12, 1}, 0},
  };
  for (const Row& r : rows) {
    CAPTURE(r.shape.str());
    CHECK(r.view.shape() == r.shape);
    CHECK(r.view.strides() == r.strides);
    CHECK(r.view.const_data<float>() == x.const_data<float>() + r.offset);
    const std::uint32_t version = x.version();
    Tensor(r.view).mark_changed();
    CHECK(x.version() == version + 1);
  }
}

TEST_CASE("views: contiguous or not") {
  const Tensor x = counting({2, 3, 4});
  CHECK(x.is_contiguous());
  CHECK(x[1].is_contiguous());
  CHECK_FALSE(x.transpose(0, 1).is_contiguous());
  CHECK_FALSE(x.narrow(1, 0, 2).is_contiguous());
  CHECK(x.narrow(0, 1, 1).is_contiguous());
  CHECK(x.unsqueeze(1).transpose(0, 1).is_contiguous());  // a size of 1 may have any stride
  // Without elements any strides will do.
  for (const Tensor& none : {ones({3, 0}), ones({0, 3}).transpose(0, 1), x.narrow(1, 0, 0), x.narrow(2, 4, 0)}) {
    CHECK(none.is_contiguous());
    CHECK(none.raw().contiguous());
  }
  CHECK(x.contiguous().identity() == x.identity());
  const Tensor t = x.transpose(0, 2), dense = t.contiguous();
  CHECK(dense.is_contiguous());
  CHECK(equal(dense, t));
  CHECK(dense.const_data<float>() != x.const_data<float>());
  CHECK(t.clone().is_contiguous());
  CHECK(counting({0, 3}).t().is_contiguous() == counting({3, 0}).is_contiguous());
}

TEST_CASE("views: reshape copies only when strides do not allow a view") {
  const Tensor x = counting({4, 6});
  CHECK(x.t().reshape({24}).const_data<float>() != x.const_data<float>());
  CHECK(x.t().reshape({24}).to_vector<float>() == x.t().contiguous().to_vector<float>());
  CHECK(x.narrow(1, 0, 4).reshape({2, 2, 2, 2}).strides() == Shape{12, 6, 2, 1});
  CHECK(x.t().view({2, 3, 2, 2}).strides() == Shape{3, 1, 12, 6});
  CHECK(x.slice(1, 0, 6, 2).view({4, 1, 3}).strides()[2] == 2);
  CHECK(x.unsqueeze(0).expand({3, 4, 6}).view({3, 24}).strides() == Shape{0, 1});
  CHECK_ERROR(x.t().view({24}), "[view]", "{6, 4}", "{1, 6}", "{24}", "use reshape");
  CHECK_ERROR(x.view({5, -1}), "[view]", "24 elements", "{5, -1}");
  CHECK_ERROR(x.view({25}), "[view]", "24 elements", "{25}");
  CHECK_ERROR(x.reshape({-1, -1}), "[reshape]", "more than one -1");
  CHECK_ERROR(x.reshape({-2, 12}), "[reshape]", "size -2");
  CHECK_ERROR(zeros({0}).reshape({-1, 0}), "[reshape]");
  CHECK(zeros({0, 3}).reshape({-1, 3}).shape() == Shape{0, 3});
}

TEST_CASE("views: out of range") {
  const Tensor x = counting({2, 3});
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = std::numeric_limits<int64_t>::min();
  CHECK_ERROR(x.transpose(0, 2), "[transpose]", "dimension 2", "-2 to 1");
  CHECK_ERROR(x.permute({0}), "[permute]", "2 dimensions", "1 numbers");
  CHECK_ERROR(x.permute({0, 0}), "[permute]", "dimension 0 is listed twice");
  CHECK_ERROR(x.permute({0, 5}), "[permute]", "dimension 5");
  CHECK_ERROR(x.narrow(1, 2, 2), "[narrow]", "2 elements from 2", "has 3");
  CHECK_ERROR(x.narrow(1, 1, kMost), "[narrow]");
  CHECK_ERROR(x.narrow(1, 0, -1), "[narrow]");
  CHECK_ERROR(x.narrow(1, kLeast, 1), "[narrow]");
  CHECK_ERROR(x.narrow(2, 0, 1), "[narrow]", "dimension 2");
  CHECK_ERROR(x.select(1, 3), "[select]", "index 3", "3 elements");
  CHECK_ERROR(x.select(0, -3), "[select]", "index -3");
  CHECK_ERROR(x[2], "[select]", "index 2");
  CHECK_ERROR(zeros({0, 3})[0], "[select]", "dimension 0 of {0, 3} is empty", "index 0");
  CHECK_ERROR(index_select(zeros({0, 3}), 0, tensor({0})), "[index_select]", "is empty", "index 0");
  CHECK(index_select(zeros({0, 3}), 0, zeros({0}, {.dtype = int64})).shape() == Shape{0, 3});
  CHECK_ERROR(x.view({int64_t{1} << 32, int64_t{1} << 32, -1}), "[Shape]", "too many elements");
  CHECK_ERROR(x.reshape({int64_t{1} << 32, int64_t{1} << 32}), "[Shape]", "too many elements");
  CHECK_ERROR(x.slice(1, 0, 2, 0), "[slice]", "step is 0");
  CHECK(x.slice(1, kLeast, kMost, kMost).shape() == Shape{2, 1});
  CHECK(x.slice(1, 2, 1).shape() == Shape{2, 0});
  CHECK_ERROR(x.expand({3}), "[expand]", "fewer dimensions");
  CHECK_ERROR(x.expand({4, 3}), "[expand]", "{2, 3}", "{4, 3}");
  CHECK_ERROR(x.expand({-1, 2, 3}), "[expand]");
  CHECK_ERROR(x.unsqueeze(3), "[unsqueeze]", "dimension 3");
  CHECK_ERROR(x.squeeze(2), "[squeeze]");
  CHECK(x.squeeze(0).shape() == Shape{2, 3});
  CHECK_ERROR(x.split(0), "[split]", "is 0");
  CHECK_ERROR(x.split({1, 1}, 1), "[split]", "sum to 2", "has 3");
  CHECK_ERROR(x.split({-1, 4}, 1), "[split]", "-1 is negative");
  CHECK_ERROR(x.chunk(0), "[chunk]", "is 0");
  CHECK_ERROR(x.flatten(1, 0), "[flatten]", "start 1", "end 0");
  CHECK_ERROR(counting({3}).t(), "[t]", "{3}");
  CHECK_ERROR(ones(std::vector<int64_t>(8, 1)).unsqueeze(0), "[Shape]", "at most 8");
  const Tensor single = tensor(1.0);
  CHECK_ERROR(single.slice(0, 0, 1), "[slice]", "single number");
  CHECK_ERROR(single.narrow(0, 0, 1), "[narrow]", "single number");
  CHECK_ERROR(single[0], "[select]", "single number");
  CHECK(single.flatten().shape() == Shape{1});
  CHECK(single.transpose(0, -1).shape() == Shape{});
}

TEST_CASE("views: chunk and split sizes") {
  auto sizes = [](const std::vector<Tensor>& parts) {
    std::vector<int64_t> n;
    for (const Tensor& t : parts) n.push_back(t.size(0));
    return n;
  };
  const Tensor x = counting({9, 2});
  CHECK(sizes(x.chunk(4)) == std::vector<int64_t>{3, 3, 3});
  CHECK(sizes(x.chunk(20)) == std::vector<int64_t>(9, 1));
  CHECK(sizes(x.chunk(1)) == std::vector<int64_t>{9});
  CHECK(sizes(x.split(4)) == std::vector<int64_t>{4, 4, 1});
  CHECK(sizes(counting({0, 2}).chunk(3)) == std::vector<int64_t>{0});
}

TEST_CASE("shapes: broadcasting and dimensions") {
  CHECK(broadcast_shapes("t", {2, 1}, {1, 3}) == Shape{2, 3});
  CHECK(broadcast_shapes("t", {}, {0, 3}) == Shape{0, 3});
  CHECK(broadcast_shapes("t", {1}, {0}) == Shape{0});
  CHECK_ERROR(broadcast_shapes("t", {2, 3}, {4, 5}), "[t]", "a is {2, 3}, b is {4, 5}", "equal or 1");
  CHECK_ERROR(ones({2}) + ones({3}), "[add]", "{2}", "{3}");
  CHECK_ERROR(ones({0}) + ones({2}), "[add]", "{0}", "{2}");
  CHECK_ERROR(sum(ones({2}), {0, 0}), "[sum]", "dimension 0 is listed twice");
  CHECK_ERROR(sum(ones({2}), 1), "[sum]", "dimension 1");
  CHECK_ERROR(cat({ones({2, 2}), ones({2, 3})}), "[cat]", "{2, 2}", "{2, 3}");
  CHECK_ERROR(cat({}), "[cat]", "no tensors");
  CHECK_ERROR(cat({tensor(1.0)}), "[cat]", "use stack");
  CHECK_ERROR(stack({ones({2}), ones({3})}), "[stack]", "{2}", "{3}");
  CHECK_ERROR(stack({}), "[stack]");
  CHECK_ERROR(index_select(ones({3}), 0, tensor({0, 3})), "[index_select]", "index 3", "0 to 2");
  CHECK_ERROR(index_select(ones({3}), 0, tensor({-1})), "[index_select]", "index -1");
  CHECK_ERROR(index_select(ones({3}), 0, tensor({0.0})), "[index_select]", "float32", "int64");
  CHECK_ERROR(index_select(ones({3}), 0, tensor({{0}})), "[index_select]", "{1, 1}");
  CHECK_ERROR(gather(ones({2, 3}), 1, tensor({0})), "[gather]", "{1}", "{2, 3}");
  CHECK_ERROR(gather(ones({2, 3}), 1, zeros({3, 1}, {.dtype = int64})), "[gather]", "larger", "dimension 0");
  CHECK_ERROR(gather(ones({2, 3}), 1, tensor({{5}})), "[gather]", "index 5");
  CHECK_ERROR(one_hot(tensor({0, 3}), 3), "[one_hot]", "index 3");
  CHECK_ERROR(one_hot(tensor({0}), 0), "[one_hot]", "positive");
  CHECK(equal(one_hot(tensor({2, 0}), 3), tensor({{0, 0, 1}, {1, 0, 0}})));
}

}  // namespace tandem::test
