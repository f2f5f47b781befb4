// Clipping of gradients.
#include <tandem/nn/layers.h>
#include <tandem/nn/utils.h>
#include <tandem/tests/support/test.h>

#include <cmath>
#include <limits>

using namespace tandem;
using nn::utils::clip_grad_norm_;
using nn::utils::clip_grad_value_;
using nn::utils::clip_grads_with_norm_;
using nn::utils::get_total_norm;

namespace {

Tensor with_gradient(const Tensor& gradient) {
  Tensor t = zeros(gradient.shape(), {.dtype = gradient.dtype(), .requires_grad = true});
  t.set_grad(gradient);
  return t;
}

}  // namespace

TEST_CASE("clip_grad_norm_ scales all gradients by one factor") {
  const Tensor a = with_gradient(tensor({3.0, 4.0})), b = with_gradient(tensor({12.0}, {.dtype = float64}));
  const Tensor unused = zeros({2}, {.requires_grad = true});
  CHECK(clip_grad_norm_({a, unused, b}, 1.0) == doctest::Approx(13));
  CHECK_CLOSE(a.grad(), tensor({3.0 / 13, 4.0 / 13}), 1e-6);
  CHECK_CLOSE(b.grad(), tensor({12.0 / (13 + 1e-6)}, {.dtype = float64}), 1e-12);
  CHECK_FALSE(unused.grad().defined());
  CHECK(clip_grad_norm_({a, b}, 10.0) == doctest::Approx(1));
  CHECK_CLOSE(a.grad(), tensor({3.0 / 13, 4.0 / 13}), 1e-6);  // already within the limit
  CHECK(clip_grad_norm_({}, 1.0) == 0);
  CHECK(clip_grad_norm_({unused}, 1.0) == 0);
}

TEST_CASE("clip_grad_norm_ writes in place and counts a tensor once") {
  const Tensor bucket = tensor({3.0, 9.0, 4.0, 9.0});
  const Tensor a = with_gradient(bucket.slice(0, 0, 4, 2));
  CHECK(clip_grad_norm_({a, a}, 1.0) == doctest::Approx(5));
  CHECK_CLOSE(bucket, tensor({0.6, 9.0, 0.8, 9.0}), 1e-6);
}

TEST_CASE("clip_grad_norm_ and norms that are not finite") {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const Tensor a = with_gradient(tensor({1.0, kInfinity}));
  CHECK_ERROR(clip_grad_norm_({a}, 1.0, true), "[clip_grad_norm_] the norm of the gradients is inf", "not finite");
  CHECK(a.grad()[0].item<double>() == 1);
  CHECK(clip_grad_norm_({a}, 1.0) == kInfinity);
  CHECK(a.grad()[0].item<double>() == 0);
  const Tensor b = with_gradient(tensor({1.0, std::nan("")}));
  CHECK(std::isnan(clip_grad_norm_({b}, 1.0)));
  CHECK(std::isnan(b.grad()[0].item<double>()));
  CHECK_ERROR(clip_grad_norm_({b}, -1.0), "max_norm is -1; it cannot be negative");
  CHECK_ERROR(clip_grad_norm_({b}, std::nan("")), "max_norm is nan");
}

TEST_CASE("get_total_norm and clip_grads_with_norm_ are the two halves of clip_grad_norm_") {
  const Tensor a = with_gradient(tensor({3.0, 4.0})), b = with_gradient(tensor({12.0}, {.dtype = float64}));
  const Tensor norm = get_total_norm({a.grad(), Tensor(), b.grad()});
  CHECK(norm.dtype() == float64);
  CHECK(norm.item<double>() == 13);
  clip_grads_with_norm_({a, zeros({2}, {.requires_grad = true}), b}, 26.0, norm);
  CHECK_CLOSE(b.grad(), tensor({12.0}, {.dtype = float64}), 0);
  clip_grads_with_norm_({a, b}, 1.0, norm);
  CHECK_CLOSE(b.grad(), tensor({12.0 / (13 + 1e-6)}, {.dtype = float64}), 1e-12);
  CHECK(get_total_norm({}).item<double>() == 0);
  CHECK_ERROR(clip_grads_with_norm_({a}, -1.0, norm), "max_norm is -1; it cannot be negative");
  CHECK_ERROR(clip_grads_with_norm_({a}, 1.0, a.grad()),
              "total_norm is not one number; give what get_total_norm gives");
}

TEST_CASE("clip_grad_value_") {
  const Tensor a = with_gradient(tensor({-3.0, 0.5, 2.0})), unused = zeros({2}, {.requires_grad = true});
  const Tensor gradient = a.grad();
  clip_grad_value_({a, unused}, 1.0);
  CHECK(equal(gradient, tensor({-1.0, 0.5, 1.0})));
  CHECK_ERROR(clip_grad_value_({a}, -1.0), "[clip_grad_value_] clip_value is -1");
}

TEST_CASE("clipping works on a model after backward") {
  nn::Linear layer(4, 4);
  sum(layer(full({2, 4}, 100.0))).backward();
  CHECK(clip_grad_norm_(layer->parameters(), 0.5) > 0.5);
  CHECK(clip_grad_norm_(layer->parameters(), 0.5) == doctest::Approx(0.5).epsilon(1e-4));
}
