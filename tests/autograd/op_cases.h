// The table of differentiable operations: a row each with random arguments, the function, and a naive reference in
// double. op_cases_test.cpp runs every row in every mode.
#pragma once
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <tandem/autograd/functions.h>
#include <tandem/tensor/create.h>

namespace tandem::test {

/// Row-major values, as plain loops see them.
struct Array {
  Shape shape;
  std::vector<double> values;

  Array() = default;
  explicit Array(const Shape& s) : shape(s), values(static_cast<std::size_t>(s.numel()), 0.0) {}
  /// Where an index of a shape that this one broadcasts to lies.
  std::size_t place(const std::vector<int64_t>& index) const {
    std::size_t at = 0;
    const std::size_t skip = index.size() - shape.size();
    for (std::size_t i = 0; i < shape.size(); ++i) {
      const int64_t size = shape[static_cast<int>(i)];
      at = at * static_cast<std::size_t>(size) + static_cast<std::size_t>(size == 1 ? 0 : index[skip + i]);
    }
    return at;
  }
  double at(const std::vector<int64_t>& index) const { return values[place(index)]; }
  double& at(const std::vector<int64_t>& index) { return values[place(index)]; }
};

/// A float64 tensor of these values.
inline Tensor from_values(const std::vector<double>& values, const Shape& shape, Device device = {}) {
  return from_span(std::span<const double>(values), shape, {.device = device});
}

/// Calls body for every index of a shape in row-major order.
inline void for_each_index(const Shape& shape, const std::function<void(const std::vector<int64_t>&)>& body) {
  std::vector<int64_t> index(shape.size(), 0);
  for (int64_t n = shape.numel(); n > 0; --n) {
    body(index);
    for (int i = shape.dim() - 1; i >= 0 && ++index[static_cast<std::size_t>(i)] == shape[i]; --i)
      index[static_cast<std::size_t>(i)] = 0;
  }
}

/// Draws sizes: any (1 to 4), all ones, or with empty dimensions.
class Sizes {
 public:
  enum Kind { any, ones, with_empty };
  Sizes(std::uint64_t seed, Kind kind) : engine_(seed), kind_(kind) {}
  int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }
  double real(double low, double high) { return std::uniform_real_distribution<double>(low, high)(engine_); }
  bool flip() { return between(0, 1) == 1; }
  /// A size of this draw's kind.
  int64_t size() { return kind_ == ones ? 1 : kind_ == with_empty ? between(0, 2) : between(1, 4); }
  /// A size that is never 0.
  int64_t positive() { return kind_ == ones ? 1 : between(1, 4); }
  Shape shape(int min_dims, int max_dims) {
    Shape s;
    for (int64_t n = between(min_dims, max_dims); n > 0; --n) s.push_back(size());
    return s;
  }
  /// A shape that broadcasts with `s`.
  Shape broadcastable(const Shape& s) {
    Shape b;
    for (int i = static_cast<int>(between(0, s.dim())); i < s.dim(); ++i) b.push_back(flip() ? 1 : s[i]);
    return b;
  }
  Kind kind() const { return kind_; }

 private:
  std::mt19937_64 engine_;
  Kind kind_;
};

struct Argument {
  Shape shape;
  double low = -2, high = 2;
};

/// One draw of a row: arguments to fill, the function, and its naive reference.
struct Example {
  std::vector<Argument> arguments;
  std::function<Tensor(const std::vector<Tensor>&)> function;
  std::function<Array(const std::vector<Array>&)> reference;
  double step = 1e-6, tolerance = 1e-5;  // of the differences
};

struct OpCase {
  std::string name;
  std::function<Example(Sizes&)> make;
};

/// Every row.
const std::vector<OpCase>& op_cases();
/// The differentiable functions that are not in tensor/pointwise.h's unary, binary and ternary lists. A new one is
/// added here, and then needs a row.
inline const std::vector<std::string> kStructuredOps = {
    "matmul",    "linear",         "sum",      "mean",           "var",         "norm",          "max",
    "min",       "max_dim",        "min_dim",  "softmax",        "log_softmax", "cross_entropy", "cross_entropy_parts",
    "nll_loss",  "nll_loss_parts", "mse_loss", "mse_loss_parts", "cat",         "stack",         "index_select",
    "gather",    "dropout",        "view",     "reshape",        "flatten",     "transpose",     "t",
    "permute",   "narrow",         "slice",    "select",         "expand",      "squeeze",       "squeeze_dim",
    "unsqueeze", "chunk",          "split",    "split_sizes",    "clone",       "contiguous",    "to_dtype",
    "to_device", "add_",           "sub_",     "mul_",           "div_",        "copy_"};

std::vector<OpCase> pointwise_cases();
std::vector<OpCase> product_and_reduction_cases();
std::vector<OpCase> loss_and_index_cases();
std::vector<OpCase> view_cases();

}  // namespace tandem::test
