// Datasets: stacking of examples, and tensors as a dataset.
#include <tandem/data/dataset.h>

#include <tandem/tests/support/test.h>

namespace tandem {
namespace {

using data::TensorDataset;
using Rows = std::vector<int64_t>;

// Example i: a transposed matrix, a number, and what `third` makes.
struct Mixed : data::Dataset<3> {
  int64_t size() const override { return 5; }
  std::array<Tensor, 3> get(int64_t i) const override {
    return {(tensor({{1, 2, 3}, {4, 5, 6}}, {.dtype = float64}) * double(i)).t(), tensor(i), third[size_t(i)]};
  }
  std::vector<Tensor> third = {ones({2}), zeros({2}), ones({3}), ones({2}, {.dtype = float64}), Tensor()};
};

TEST_CASE("dataset: examples of any strides and types are stacked") {
  const Mixed set;
  const auto [matrix, number, pair] = set.get_batch(Rows{1, 0, 1});
  CHECK(matrix.shape() == Shape{3, 3, 2});
  CHECK(matrix.dtype() == float64);
  CHECK(matrix.to_vector<int64_t>() == Rows{1, 4, 2, 5, 3, 6, 0, 0, 0, 0, 0, 0, 1, 4, 2, 5, 3, 6});
  CHECK(number.shape() == Shape{3});
  CHECK(number.dtype() == int64);
  CHECK(number.to_vector<int64_t>() == Rows{1, 0, 1});
  CHECK(pair.to_vector<int64_t>() == Rows{0, 0, 1, 1, 0, 0});
}

TEST_CASE("dataset: examples that do not fit are errors that name them") {
  const Mixed set;
  CHECK_ERROR(set.get_batch(Rows{0, 2}), "[get_batch] tensor 2 of row 0 is float32 {2} on cpu", "of row 2 float32 {3}",
              "must agree");
  CHECK_ERROR(set.get_batch(Rows{1, 3}), "tensor 2 of row 1 is float32 {2}", "of row 3 float64 {2}");
  CHECK_ERROR(set.get_batch(Rows{0, 4}), "tensor 2 of row 4 is undefined");
  CHECK_ERROR(set.get_batch({}), "no rows were asked for", "at least one row");
}

TEST_CASE("dataset: batches carry no gradient history") {
  Mixed set;
  set.third[0].requires_grad_();
  const auto batch = set.get_batch(Rows{0});
  CHECK_FALSE(batch[2].requires_grad());
  const TensorDataset tensors(set.third[0], ones({2}));
  CHECK_FALSE(tensors.get(0)[0].requires_grad());
  CHECK_FALSE(tensors.get_batch(Rows{0})[0].requires_grad());
}

TEST_CASE("dataset: tensors give their rows") {
  const Tensor x = arange(12).view({4, 3}), y = arange(4), flags = tensor({true, false, true, false});
  const TensorDataset set(x, y, flags);
  static_assert(decltype(set)::arity == 3);
  CHECK(set.size() == 4);
  const auto [row, label, flag] = set.get(2);
  CHECK(row.to_vector<int64_t>() == Rows{6, 7, 8});
  CHECK(label.shape() == Shape{});
  CHECK(label.item<int64_t>() == 2);
  CHECK(flag.item<bool>());
  const auto batch = set.get_batch(Rows{3, 0, 3});
  CHECK(batch[0].shape() == Shape{3, 3});
  CHECK(batch[0].to_vector<int64_t>() == Rows{9, 10, 11, 0, 1, 2, 9, 10, 11});
  CHECK(batch[1].to_vector<int64_t>() == Rows{3, 0, 3});
  CHECK(batch[2].dtype() == boolean);
  CHECK(set.get_batch({})[0].shape() == Shape{0, 3});
}

TEST_CASE("dataset: tensors are shared, and strided ones copied") {
  Tensor x = zeros({3, 2});
  const TensorDataset<1> set(x);
  x.fill_(5);
  CHECK(set.get(1)[0].to_vector<float>() == std::vector<float>{5, 5});
  CHECK(TensorDataset(arange(6).view({2, 3}).t()).get_batch(Rows{1})[0].to_vector<int64_t>() == Rows{1, 4});
}

TEST_CASE("dataset: tensors that do not fit, and rows that do not exist, are errors") {
  CHECK_ERROR(TensorDataset(ones({4, 2}), ones({3})), "[TensorDataset] tensor 0 has 4 rows and tensor 1 has 3");
  CHECK_ERROR(TensorDataset(ones({4, 2}), ones({})), "tensor 1 has no rows");
  CHECK_ERROR(TensorDataset(Tensor()), "tensor 0 has no rows");
  const TensorDataset set(ones({4}));
  CHECK_ERROR(set.get(4), "[TensorDataset] row 4 does not exist; there are 4 rows");
  CHECK_ERROR(set.get(-1), "row -1 does not exist");
  CHECK_ERROR(set.get_batch(Rows{0, 9}), "row 9 does not exist");
}

}  // namespace
}  // namespace tandem
