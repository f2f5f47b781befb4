// Initial values: spreads, gains, and that every write is seen by backward.
#include <tandem/nn/init.h>
#include <tandem/tensor/random.h>
#include <tandem/tests/support/test.h>

#include <cmath>

using namespace tandem;
namespace init = nn::init;

namespace {

double deviation(const Tensor& t) { return std::sqrt(var(t).item<double>()); }
double largest(const Tensor& t) { return max(abs(t)).item<double>(); }

}  // namespace

TEST_CASE("uniform_, normal_ and constants") {
  manual_seed(1);
  Tensor t = empty({100, 100}, {.requires_grad = true});
  CHECK(init::uniform_(t, 2, 4).identity() == t.identity());
  CHECK(min(t).item<double>() >= 2);
  CHECK(max(t).item<double>() <= 4);
  CHECK(mean(t).item<double>() == doctest::Approx(3).epsilon(0.01));
  CHECK(deviation(t) == doctest::Approx(2 / std::sqrt(12.0)).epsilon(0.02));
  init::normal_(t, -1, 0.5);
  CHECK(mean(t).item<double>() == doctest::Approx(-1).epsilon(0.02));
  CHECK(deviation(t) == doctest::Approx(0.5).epsilon(0.03));
  CHECK(equal(init::constant_(t, 3), full({100, 100}, 3.0)));
  CHECK(equal(init::zeros_(t), zeros({100, 100})));
  CHECK(equal(init::ones_(t), ones({100, 100})));
  CHECK(t.requires_grad());
  CHECK(t.is_leaf());
}

TEST_CASE("a write is seen by backward, and the seed decides the values") {
  Tensor t = ones({3}, {.requires_grad = true});
  const Tensor y = sum(t * t);
  const std::uint32_t version = t.version();
  init::uniform_(t);
  CHECK(t.version() > version);
  CHECK_ERROR(y.backward(), "[mul]", "changed in place");
  manual_seed(9);
  const Tensor a = init::normal_(empty({50}));
  manual_seed(9);
  CHECK(equal(a, init::normal_(empty({50}))));
}

TEST_CASE("Xavier and Kaiming") {
  manual_seed(2);
  Tensor t = empty({200, 50, 2});  // fan in 100, fan out 400
  double bound = 2 * std::sqrt(6.0 / 500);
  init::xavier_uniform_(t, 2);
  CHECK(largest(t) <= bound);
  CHECK(largest(t) > 0.99 * bound);
  init::xavier_normal_(t);
  CHECK(deviation(t) == doctest::Approx(std::sqrt(2.0 / 500)).epsilon(0.02));

  bound = std::sqrt(6.0 / 100);
  init::kaiming_uniform_(t);
  CHECK(largest(t) <= bound);
  CHECK(largest(t) > 0.99 * bound);
  init::kaiming_uniform_(t, {.a = std::sqrt(5.0)});  // what Linear uses
  CHECK(largest(t) <= 0.1);
  CHECK(largest(t) > 0.099);
  init::kaiming_normal_(t, {.mode = init::Fan::out, .nonlinearity = init::Nonlinearity::relu});
  CHECK(deviation(t) == doctest::Approx(std::sqrt(2.0 / 400)).epsilon(0.02));
  init::kaiming_normal_(t, {.nonlinearity = init::Nonlinearity::linear});
  CHECK(deviation(t) == doctest::Approx(0.1).epsilon(0.02));
  init::kaiming_normal_(empty({0, 0}));
}

TEST_CASE("gains are PyTorch's") {
  using init::Nonlinearity;
  CHECK(init::calculate_gain(Nonlinearity::linear) == 1);
  CHECK(init::calculate_gain(Nonlinearity::sigmoid) == 1);
  CHECK(init::calculate_gain(Nonlinearity::tanh) == doctest::Approx(1.6666666666666667));
  CHECK(init::calculate_gain(Nonlinearity::relu) == doctest::Approx(1.4142135623730951));
  CHECK(init::calculate_gain(Nonlinearity::leaky_relu) == doctest::Approx(1.4141428569978354));
  CHECK(init::calculate_gain(Nonlinearity::leaky_relu, 0.2) == doctest::Approx(1.3867504905630728));
}

TEST_CASE("eye_") {
  CHECK(equal(init::eye_(empty({2, 3})), tensor({{1.0, 0.0, 0.0}, {0.0, 1.0, 0.0}})));
  CHECK(equal(init::eye_(empty({2, 1}, {.dtype = float64})), tensor({{1.0}, {0.0}}, {.dtype = float64})));
}

TEST_CASE("what cannot be initialised is refused") {
  Tensor whole = zeros({2, 2}, {.dtype = int64});
  CHECK_ERROR(init::uniform_(whole), "[uniform_] the tensor is int64");
  CHECK_ERROR(init::normal_(whole), "[normal_] the tensor is int64");
  CHECK_ERROR(init::uniform_(ones({2}), 1, 0), "the range 1 to 0 is empty");
  CHECK_ERROR(init::normal_(ones({2}), 0, -1), "the standard deviation is -1");
  CHECK_ERROR(init::xavier_uniform_(ones({2})), "[xavier_uniform_]", "{2}", "uniform_");
  CHECK_ERROR(init::xavier_normal_(ones({2})), "[xavier_normal_]");
  CHECK_ERROR(init::kaiming_uniform_(ones({2})), "[kaiming_uniform_]");
  CHECK_ERROR(init::kaiming_normal_(ones({})), "[kaiming_normal_]");
  CHECK_ERROR(init::eye_(ones({2})), "[eye_] needs a matrix, but the tensor is {2}");
}
