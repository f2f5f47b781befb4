// Rows of the pointwise operations, expanded from the lists in tensor/pointwise.h, and of the in-place ones.
#include <tandem/tests/autograd/op_cases.h>

#include <cmath>
#include <map>

namespace tandem::test {
namespace {

double gelu_reference(double x) { return x * 0.5 * std::erfc(-x / std::sqrt(2.0)); }

// Independent of the expressions in the lists. A listed operation that is missing here throws when its row is made.
const std::map<std::string, double (*)(double)> kUnary = {
    {"neg", [](double x) { return 0.0 - x; }},
    {"abs", [](double x) { return std::fabs(x); }},
    {"relu", [](double x) { return std::fmax(x, 0.0); }},
    {"exp", [](double x) { return std::exp(x); }},
    {"log", [](double x) { return std::log(x); }},
    {"sqrt", [](double x) { return std::sqrt(x); }},
    {"sigmoid", [](double x) { return 0.5 * (1.0 + std::tanh(0.5 * x)); }},
    {"tanh", [](double x) { return (std::exp(2 * x) - 1) / (std::exp(2 * x) + 1); }},
    {"gelu", gelu_reference},
};
const std::map<std::string, double (*)(double, double)> kBinary = {
    {"add", [](double a, double b) { return a + b; }},
    {"sub", [](double a, double b) { return a - b; }},
    {"mul", [](double a, double b) { return a * b; }},
    {"div", [](double a, double b) { return a / b; }},
    {"maximum", [](double a, double b) { return std::fmax(a, b); }},
    {"minimum", [](double a, double b) { return std::fmin(a, b); }},
    {"pow", [](double a, double b) { return std::exp(b * std::log(a)); }},
};

Array map1(const Array& x, double (*f)(double)) {
  Array y(x.shape);
  for (std::size_t i = 0; i < x.values.size(); ++i) y.values[i] = f(x.values[i]);
  return y;
}

Array map2(const Array& a, const Array& b, double (*f)(double, double)) {
  Array y(broadcast_shapes("reference", a.shape, b.shape));
  for_each_index(y.shape, [&](const auto& i) { y.at(i) = f(a.at(i), b.at(i)); });
  return y;
}

// Two shapes that broadcast to each other, both stretched in general.
std::pair<Shape, Shape> pair_of_shapes(Sizes& s) {
  const Shape full = s.shape(0, 4);
  Shape a = full;
  for (int i = 0; i < a.dim(); ++i)
    if (s.between(0, 3) == 0) a[i] = 1;
  const Shape b = s.broadcastable(full);
  return s.flip() ? std::pair(a, b) : std::pair(b, a);
}

template <class Function>
OpCase unary_case(const char* name, Function function, double low, double high) {
  double (*const f)(double) = kUnary.at(name);
  return {name, [=](Sizes& s) {
            return Example{{{s.shape(0, 4), low, high}},
                           [=](const auto& in) { return function(in[0]); },
                           [=](const auto& in) { return map1(in[0], f); }};
          }};
}

template <class Function>
OpCase binary_case(const char* name, Function function, Argument a, Argument b) {
  double (*const f)(double, double) = kBinary.at(name);
  return {name, [=](Sizes& s) {
            const auto [shape_a, shape_b] = pair_of_shapes(s);
            return Example{{{shape_a, a.low, a.high}, {shape_b, b.low, b.high}},
                           [=](const auto& in) { return function(in[0], in[1]); },
                           [=](const auto& in) { return map2(in[0], in[1], f); }};
          }};
}

// x op_ y on a copy of x, so that the row can be differentiated by x too.
OpCase in_place_case(const char* name, Tensor& (Tensor::*op)(const Tensor&), const char* like, double low) {
  double (*const f)(double, double) = kBinary.at(like);
  return {name, [=](Sizes& s) {
            const Shape shape = s.shape(0, 3);
            return Example{{{shape, -2, 2}, {s.broadcastable(shape), low, 2}},
                           [=](const auto& in) {
                             Tensor y = in[0] * 1.0;
                             (y.*op)(in[1]);
                             return y * y;  // what is recorded afterwards sees the new value
                           },
                           [=](const auto& in) {
                             const Array y = map2(in[0], in[1], f);
                             return map2(y, y, kBinary.at("mul"));
                           }};
          }};
}

}  // namespace

std::vector<OpCase> pointwise_cases() {
  std::vector<OpCase> cases;
#define X(op, takes, uses, value, derivative, low, high) \
  cases.push_back(unary_case(                            \
      #op, [](const Tensor& x) { return op(x); }, low, high));
  TANDEM_UNARY_OPS(X)
#undef X
#define X(op, takes, uses, value, da, db, la, ha, lb, hb) \
  cases.push_back(                                        \
      binary_case(#op, [](const Tensor& a, const Tensor& b) { return op(a, b); }, {{}, la, ha}, {{}, lb, hb}));
  TANDEM_BINARY_OPS(X)
#undef X
  // Left of 0 where the domain in the list stays right of a kink.
  cases.push_back(unary_case(
      "abs", [](const Tensor& x) { return abs(x); }, -2, -0.2));
  cases.push_back(unary_case(
      "relu", [](const Tensor& x) { return relu(x); }, -2, -0.2));
  cases.push_back({"where", [](Sizes& s) {
                     const Shape full = s.shape(0, 3);
                     Array condition(s.broadcastable(full));
                     for (double& c : condition.values) c = s.flip();
                     const Shape shape_a = s.broadcastable(full), shape_b = s.broadcastable(full);
                     return Example{{{shape_a}, {shape_b}},
                                    [=](const auto& in) {
                                      const Tensor c = from_values(condition.values, condition.shape, in[0].device());
                                      return where(c != 0, in[0], in[1]);
                                    },
                                    [=](const auto& in) {
                                      Array y(broadcast_shapes("reference", condition.shape,
                                                               broadcast_shapes("reference", shape_a, shape_b)));
                                      for_each_index(y.shape, [&](const auto& i) {
                                        y.at(i) = condition.at(i) != 0 ? in[0].at(i) : in[1].at(i);
                                      });
                                      return y;
                                    }};
                   }});
  cases.push_back({"clamp", [](Sizes& s) {
                     return Example{
                         {{s.shape(0, 3), -2, 2}},
                         [](const auto& in) { return clamp(in[0], -0.75, 1.25); },
                         [](const auto& in) {
                           return map1(in[0], [](double x) { return x < -0.75 ? -0.75 : x > 1.25 ? 1.25 : x; });
                         }};
                   }});
  cases.push_back(in_place_case("add_", &Tensor::add_, "add", -2));
  cases.push_back(in_place_case("sub_", &Tensor::sub_, "sub", -2));
  cases.push_back(in_place_case("mul_", &Tensor::mul_, "mul", -2));
  cases.push_back(in_place_case("div_", &Tensor::div_, "div", 0.5));
  cases.push_back({"copy_", [](Sizes& s) {
                     const Shape shape = s.shape(0, 3);
                     return Example{{{shape}, {s.broadcastable(shape)}},
                                    [](const auto& in) {
                                      Tensor y = in[0] * 2.0;
                                      y.copy_(in[1]);
                                      return y * in[0];
                                    },
                                    [](const auto& in) { return map2(in[1], in[0], kBinary.at("mul")); }};
                   }});
  return cases;
}

const std::vector<OpCase>& op_cases() {
  static const std::vector<OpCase> all = [] {
    std::vector<OpCase> cases = pointwise_cases();
    for (auto make : {product_and_reduction_cases, loss_and_index_cases, view_cases})
      for (OpCase& c : make()) cases.push_back(std::move(c));
    return cases;
  }();
  return all;
}

}  // namespace tandem::test
