// Groups of parameters, learning rates, and the errors of constructors.
#include <cmath>
#include <limits>

#include <tandem/tests/optim/support.h>

using namespace tandem;
using namespace tandem::test;
using namespace tandem::optim;

namespace {
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

double setting(const Optimizer& optimizer, const std::string& name) {
  return entry(optimizer.state_dict(), name).item<double>();
}
}  // namespace

TEST_CASE("groups inherit what they leave out") {
  const std::vector<Tensor> a{leaf({1}), leaf({2})}, b{leaf({3})};
  const SGD sgd({{.params = a}, {.params = b, .lr = 0.01, .momentum = 0.0}},
                {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.5});
  CHECK(sgd.group_count() == 2);
  CHECK(sgd.parameters().size() == 3);
  CHECK(sgd.lr(0) == 0.1);
  CHECK(sgd.lr(1) == 0.01);
  CHECK(setting(sgd, "group.0.momentum") == 0.9);
  CHECK(setting(sgd, "group.1.momentum") == 0);
  CHECK(setting(sgd, "group.1.weight_decay") == 0.5);
  CHECK(entry(sgd.state_dict(), "group.0.parameters").item<int64_t>() == 2);

  Adam adam({{.params = a}, {.params = b, .betas = {{0.5, 0.6}}, .amsgrad = true}}, {.lr = 0.2, .eps = 1e-4});
  CHECK(setting(adam, "group.0.beta2") == 0.999);
  CHECK(setting(adam, "group.1.beta1") == 0.5);
  CHECK(setting(adam, "group.1.beta2") == 0.6);
  CHECK(setting(adam, "group.1.eps") == 1e-4);
  CHECK(setting(adam, "group.0.amsgrad") == 0);
  CHECK(setting(adam, "group.1.amsgrad") == 1);
  adam.add_param_group({.params = {leaf({4})}, .weight_decay = 0.3});
  CHECK(adam.lr(2) == 0.2);
  CHECK(setting(adam, "group.2.weight_decay") == 0.3);
  run_steps(adam, 0, 1);
  CHECK(entry(adam.state_dict(), "2.max_exp_avg_sq").defined());
  CHECK(!entry(adam.state_dict(), "3.max_exp_avg_sq").defined());
  CHECK(setting(AdamW({leaf({1})}), "group.0.weight_decay") == 0.01);
}

TEST_CASE("a group with its own options moves as an optimizer with them") {
  Tensor a = leaf({1, 2}), b = leaf({1, 2}), alone_a = leaf({1, 2}), alone_b = leaf({1, 2});
  SGD both({{.params = {a}}, {.params = {b}, .lr = 0.01, .momentum = 0.5}}, {.lr = 0.1});
  SGD one({alone_a}, {.lr = 0.1}), two({alone_b}, {.lr = 0.01, .momentum = 0.5});
  run_steps(both, 0, 4);
  run_steps(one, 0, 4);
  run_steps(two, 0, 4);
  CHECK(equal(a, alone_a));
  CHECK(equal(b, alone_b));
}

TEST_CASE("every way to give parameters") {
  const Tensor w = leaf({1}), b = leaf({2});
  const std::vector<Tensor> list{w, b};
  const std::vector<SGDGroup> groups{{.params = {w}}, {.params = {b}}};
  CHECK(SGD(list).group_count() == 1);
  CHECK(SGD({w}).parameters().size() == 1);
  CHECK(SGD({w, b}, {.lr = 0.1}).parameters().size() == 2);
  CHECK(SGD({{.params = list}}).parameters().size() == 2);
  CHECK(SGD({{.params = {w}}, {.params = {b}}}).group_count() == 2);
  CHECK(SGD(groups, {.lr = 0.1}).group_count() == 2);
  CHECK(Adam({{.params = list}}, {.lr = 0.1}).group_count() == 1);
  CHECK(AdamW({{.params = list}}, {.lr = 0.1}).group_count() == 1);
  CHECK(AdamW({w, b}, {.lr = 0.1}).group_count() == 1);
}

TEST_CASE("learning rates can be read and set") {
  SGD sgd({{.params = {leaf({1})}}, {.params = {leaf({1})}, .lr = 0.3}}, {.lr = 0.1});
  sgd.set_lr(1, 0.7);
  CHECK(sgd.lr(0) == 0.1);
  CHECK(sgd.lr(1) == 0.7);
  sgd.set_lr(0.25);
  CHECK(sgd.lr() == 0.25);
  CHECK(sgd.lr(1) == 0.25);
  CHECK_ERROR(sgd.set_lr(0, -1), "[SGD] lr is -1; it must be a finite number that is not negative");
  CHECK_ERROR(sgd.set_lr(kNaN), "[SGD] lr is nan");
  CHECK_ERROR(sgd.set_lr(2, 0.1), "[SGD] there is no group 2; the optimizer has 2, counted from 0");
  CHECK_ERROR(sgd.lr(5), "[SGD] there is no group 5");
  CHECK(sgd.lr() == 0.25);
  Tensor p = sgd.parameters()[0];
  set_gradient(p, {2});
  sgd.step();
  CHECK(p.item<double>() == 0.5);
}

TEST_CASE("parameters that cannot be optimized") {
  const Tensor w = leaf({1, 2});
  CHECK_ERROR(SGD(std::vector<Tensor>{}), "[SGD] the list of parameters is empty", "model.parameters()");
  CHECK_ERROR(Adam(std::vector<Tensor>{}), "[Adam] the list of parameters is empty");
  CHECK_ERROR(AdamW(std::vector<Tensor>{}), "[AdamW] the list of parameters is empty");
  CHECK_ERROR(SGD(std::vector<SGDGroup>{}), "[SGD] the list of groups is empty; pass at least one");
  CHECK_ERROR(Adam(std::vector<AdamGroup>{}), "[Adam] the list of groups is empty");
  CHECK_ERROR(AdamW(std::vector<AdamGroup>{}), "[AdamW] the list of groups is empty");
  CHECK_ERROR(SGD({{.params = {w}}, {.params = {}}}), "[SGD] the list of parameters is empty", "leave out a group");
  CHECK_ERROR(SGD({w, Tensor()}), "[SGD] parameter 1 is undefined; assign");
  CHECK_ERROR(SGD({w, w}), "[SGD] parameter 1 is in the list or in another group already; give each parameter once");
  CHECK_ERROR(SGD({{.params = {w}}, {.params = {leaf({1}), w}}}), "[SGD] parameter 2 is in the list");
  CHECK_ERROR(Adam({w * w}), "[Adam] parameter 0 was computed by a recorded operation", "detach()");
  CHECK_ERROR(SGD({zeros({2}, {.dtype = int64})}), "[SGD] parameter 0 is int64; convert it to float32");
  CHECK_ERROR(SGD({zeros({2}, {.dtype = bfloat16})}), "[SGD] parameter 0 is bfloat16");
  (void)SGD({zeros({3, 0}, {.requires_grad = true})});
  CHECK_ERROR(SGD({zeros({2, 3}).t()}), "[SGD] parameter 0 of shape {3, 2} is not contiguous; make it");
}

TEST_CASE("a group that is refused leaves the optimizer as it was") {
  const Tensor w = leaf({1});
  SGD sgd({w}, {.lr = 0.1});
  CHECK_ERROR(sgd.add_param_group({.params = {leaf({1}), w}}), "[SGD] parameter 2 is in the list");
  CHECK_ERROR(sgd.add_param_group({.params = {leaf({1})}, .lr = -1.0}), "[SGD] lr is -1");
  CHECK_ERROR(sgd.add_param_group({.params = {leaf({1})}, .nesterov = true}), "[SGD] nesterov needs momentum");
  Adam adam({w});
  CHECK_ERROR(adam.add_param_group({.params = {w}}), "[Adam] parameter 1 is in the list");
  CHECK_ERROR(adam.add_param_group({.params = {leaf({1})}, .betas = {{0.9, 2.0}}}), "[Adam] betas are 0.9 and 2");
  CHECK(sgd.group_count() == 1);
  CHECK(sgd.parameters().size() == 1);
  CHECK(adam.group_count() == 1);
  sgd.add_param_group({.params = {leaf({1})}});
  CHECK(sgd.lr(1) == 0.1);
}

TEST_CASE("settings out of range") {
  const std::vector<Tensor> w{leaf({1})};
  CHECK_ERROR(SGD(w, {.lr = -0.1}), "[SGD] lr is -0.1; it must be a finite number that is not negative");
  CHECK_ERROR(SGD(w, {.lr = kInfinity}), "[SGD] lr is inf");
  CHECK_ERROR(SGD(w, {.momentum = -0.1}), "[SGD] momentum is -0.1");
  CHECK_ERROR(SGD(w, {.momentum = 0.9, .dampening = -0.1}), "[SGD] dampening is -0.1");
  CHECK_ERROR(SGD(w, {.weight_decay = -0.1}), "[SGD] weight_decay is -0.1");
  CHECK_ERROR(SGD(w, {.nesterov = true}), "[SGD] nesterov needs momentum", "momentum is 0", "0.9");
  CHECK_ERROR(SGD(w, {.momentum = 0.9, .dampening = 0.1, .nesterov = true}), "[SGD] nesterov", "dampening 0.1");
  CHECK_ERROR(Adam(w, {.lr = kNaN}), "[Adam] lr is nan");
  CHECK_ERROR(Adam(w, {.betas = {-0.1, 0.9}}), "[Adam] beta1 is -0.1");
  CHECK_ERROR(Adam(w, {.betas = {0.9, 1.0}}), "[Adam] betas are 0.9 and 1; both must be below 1");
  CHECK_ERROR(Adam(w, {.betas = {1.0, 0.9}}), "[Adam] betas are 1 and 0.9");
  CHECK_ERROR(AdamW(w, {.eps = -1}), "[AdamW] eps is -1");
  CHECK_ERROR(AdamW(w, {.weight_decay = -1}), "[AdamW] weight_decay is -1");
}
