// Rows of the matrix products and reductions.
#include <tandem/tests/autograd/op_cases.h>

#include <algorithm>
#include <cmath>

namespace tandem::test {
namespace {

// a {m, k} x b {k, n} with batches in front, by the definition. Both have at least two dimensions.
Array naive_matmul(const Array& a, const Array& b) {
  const int da = a.shape.dim(), db = b.shape.dim();
  Shape batch_a = a.shape, batch_b = b.shape;
  for (int i = 0; i < 2; ++i) {
    batch_a.erase(batch_a.dim() - 1);
    batch_b.erase(batch_b.dim() - 1);
  }
  Shape shape = broadcast_shapes("reference", batch_a, batch_b);
  const int64_t m = a.shape[da - 2], k = a.shape[da - 1], n = b.shape[db - 1];
  shape.push_back(m);
  shape.push_back(n);
  Array y(shape);
  for_each_index(shape, [&](std::vector<int64_t> index) {
    double sum = 0;
    const std::size_t r = index.size() - 2, c = index.size() - 1;
    std::vector<int64_t> ia = index, ib = index;
    for (int64_t j = 0; j < k; ++j) {
      ia[c] = j;
      ib[r] = j;
      // Sizes of 1 among the matrix dimensions do not stretch here, but place() reads index 0 of them, which is right.
      sum += a.at(ia) * b.at(ib);
    }
    y.at(index) = sum;
  });
  return y;
}

Array reshaped(Array x, const Shape& shape) {
  x.shape = shape;
  return x;
}

OpCase matmul_case() {
  return {"matmul", [](Sizes& s) {
            const int64_t m = s.size(), k = s.size(), n = s.size();
            const int form = static_cast<int>(s.between(0, 4));
            Shape a{m, k}, b{k, n};
            if (form == 0 || form == 3) a = {k};
            if (form == 1 || form == 3) b = {k};
            if (form == 4) {
              const Shape batch = s.shape(0, 2), batch_a = s.broadcastable(batch), batch_b = s.broadcastable(batch);
              a = batch_a;
              b = batch_b;
              for (const int64_t size : {m, k}) a.push_back(size);
              for (const int64_t size : {k, n}) b.push_back(size);
            }
            return Example{
                {{a}, {b}},
                [](const auto& in) { return matmul(in[0], in[1]); },
                [=](const auto& in) {
                  const bool row = a.dim() == 1, column = b.dim() == 1;
                  const Array y =
                      naive_matmul(row ? reshaped(in[0], {1, k}) : in[0], column ? reshaped(in[1], {k, 1}) : in[1]);
                  return row && column ? reshaped(y, {}) : row ? reshaped(y, {n}) : column ? reshaped(y, {m}) : y;
                }};
          }};
}

OpCase linear_case(bool with_bias, bool relu) {
  return {"linear", [=](Sizes& s) {
            const int64_t in_size = s.size(), out = s.size();
            Shape shape = s.shape(0, 2), result = shape;
            shape.push_back(in_size);
            result.push_back(out);
            std::vector<Argument> arguments{{shape}, {{out, in_size}}};
            if (with_bias) arguments.push_back({{out}});
            return Example{arguments,
                           [=](const auto& in) { return linear(in[0], in[1], with_bias ? in[2] : Tensor(), relu); },
                           [=](const auto& in) {
                             Array y(result);
                             for_each_index(result, [&](std::vector<int64_t> index) {
                               const int64_t o = index.back();
                               double sum = with_bias ? in[2].at({o}) : 0.0;
                               std::vector<int64_t> x = index;
                               for (int64_t j = 0; j < in_size; ++j) {
                                 x.back() = j;
                                 sum += in[0].at(x) * in[1].at({o, j});
                               }
                               y.at(index) = relu ? std::max(sum, 0.0) : sum;
                             });
                             return y;
                           }};
          }};
}

// Which dimensions to reduce: a random subset, none listed meaning all, some counted from the end.
struct Subset {
  std::vector<int64_t> dims;
  std::vector<bool> mask;
};
Subset draw_dims(Sizes& s, int dims) {
  Subset subset{{}, std::vector<bool>(static_cast<std::size_t>(dims), false)};
  for (int d = 0; d < dims; ++d)
    if (s.flip()) {
      subset.mask[static_cast<std::size_t>(d)] = true;
      subset.dims.push_back(s.flip() ? d : d - dims);
    }
  if (subset.dims.empty()) subset.mask.assign(subset.mask.size(), true);
  return subset;
}

// Applies `finish` to the values that go into each result, in row-major order.
Array naive_reduce(const Array& x, const std::vector<bool>& mask, bool keepdim,
                   const std::function<double(const std::vector<double>&)>& finish) {
  Shape kept = x.shape, result;
  for (int d = 0; d < x.shape.dim(); ++d) {
    if (mask[static_cast<std::size_t>(d)]) kept[d] = 1;
    if (!mask[static_cast<std::size_t>(d)] || keepdim) result.push_back(kept[d]);
  }
  Array y(kept);
  std::vector<std::vector<double>> groups(y.values.size());
  for_each_index(x.shape, [&](const auto& index) { groups[y.place(index)].push_back(x.at(index)); });
  for (std::size_t i = 0; i < groups.size(); ++i) y.values[i] = finish(groups[i]);
  return reshaped(y, result);
}

double total(const std::vector<double>& v) {
  long double sum = 0;
  for (const double x : v) sum += x;
  return static_cast<double>(sum);
}
double average(const std::vector<double>& v) { return total(v) / static_cast<double>(v.size()); }
double length(const std::vector<double>& v) {
  double sum = 0;
  for (const double x : v) sum += x * x;
  return std::sqrt(sum);
}

OpCase reduce_case(const char* name, std::function<Tensor(const Tensor&, const Dims&, bool)> function,
                   std::function<double(const std::vector<double>&)> finish) {
  return {name, [=](Sizes& s) {
            const Shape shape = s.shape(0, 4);
            const Subset subset = draw_dims(s, shape.dim());
            const bool keepdim = s.flip();
            return Example{{{shape}},
                           [=](const auto& in) { return function(in[0], Dims(subset.dims), keepdim); },
                           [=](const auto& in) { return naive_reduce(in[0], subset.mask, keepdim, finish); }};
          }};
}

double variance(const std::vector<double>& v, int64_t correction) {
  double sum = 0;
  for (const double x : v) sum += (x - average(v)) * (x - average(v));
  return sum / static_cast<double>(std::max<int64_t>(0, static_cast<int64_t>(v.size()) - correction));
}

OpCase var_case() {
  return {"var", [](Sizes& s) {
            const Shape shape = s.shape(0, 4);
            const Subset subset = draw_dims(s, shape.dim());
            const bool keepdim = s.flip();
            const int64_t correction = s.between(0, 1);
            return Example{{{shape}},
                           [=](const auto& in) { return var(in[0], Dims(subset.dims), correction, keepdim); },
                           [=](const auto& in) {
                             return naive_reduce(in[0], subset.mask, keepdim,
                                                 [=](const auto& v) { return variance(v, correction); });
                           }};
          }};
}

OpCase extreme_case(const char* name, bool largest) {
  return {name, [=](Sizes& s) {
            Shape shape;
            for (int64_t n = s.between(0, 3); n > 0; --n) shape.push_back(s.positive());
            return Example{{{shape}},
                           [=](const auto& in) { return largest ? max(in[0]) : min(in[0]); },
                           [=](const auto& in) {
                             Array y((Shape()));
                             y.values[0] = largest ? *std::max_element(in[0].values.begin(), in[0].values.end())
                                                   : *std::min_element(in[0].values.begin(), in[0].values.end());
                             return y;
                           }};
          }};
}

OpCase extreme_dim_case(const char* name, bool largest) {
  return {name, [=](Sizes& s) {
            Shape shape = s.shape(0, 3);
            const int d = shape.dim() == 0 ? 0 : static_cast<int>(s.between(0, shape.dim() - 1));
            if (shape.dim() > 0) shape[d] = s.positive();
            const bool keepdim = s.flip();
            return Example{
                {{shape}},
                [=](const auto& in) {
                  return (largest ? max(in[0], d, keepdim) : min(in[0], d - std::max(1, shape.dim()), keepdim)).values;
                },
                [=](const auto& in) {
                  std::vector<bool> mask(shape.size(), false);
                  if (!mask.empty()) mask[static_cast<std::size_t>(d)] = true;
                  return naive_reduce(in[0], mask, keepdim, [=](const auto& v) {
                    return largest ? *std::max_element(v.begin(), v.end()) : *std::min_element(v.begin(), v.end());
                  });
                }};
          }};
}

}  // namespace

std::vector<OpCase> product_and_reduction_cases() {
  return {matmul_case(),
          linear_case(false, false),
          linear_case(true, false),
          linear_case(false, true),
          linear_case(true, true),
          reduce_case(
              "sum", [](const Tensor& x, const Dims& d, bool keep) { return sum(x, d, keep); }, total),
          reduce_case(
              "mean", [](const Tensor& x, const Dims& d, bool keep) { return mean(x, d, keep); }, average),
          reduce_case(
              "norm", [](const Tensor& x, const Dims& d, bool keep) { return norm(x, d, keep); }, length),
          var_case(),
          extreme_case("max", true),
          extreme_case("min", false),
          extreme_dim_case("max_dim", true),
          extreme_dim_case("min_dim", false)};
}

}  // namespace tandem::test
