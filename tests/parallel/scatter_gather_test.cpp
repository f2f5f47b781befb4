// The pieces of data parallelism, one by one and in a row.
#include <tandem/parallel/replicas.h>
#include <tandem/parallel/scatter_gather.h>
#include <tandem/tests/parallel/virtual_devices.h>

using namespace tandem;
using namespace tandem::test;
using parallel::data_parallel;
using parallel::parallel_apply;
using parallel::replicate;
using parallel::scatter;

namespace {

std::vector<int64_t> sizes_of(const parallel::DataParallelOptions& options, int64_t rows) {
  return parallel::Placement(nn::LinearImpl(1, 1), options).sizes(rows);
}

}  // namespace

TEST_CASE("balanced parts differ by at most one, and none is empty") {
  using parallel::balanced_sizes;
  CHECK(balanced_sizes(8, 2) == std::vector<int64_t>{4, 4});
  CHECK(balanced_sizes(9, 4) == std::vector<int64_t>{3, 2, 2, 2});
  CHECK(balanced_sizes(36, 7) == std::vector<int64_t>{6, 5, 5, 5, 5, 5, 5});
  CHECK(balanced_sizes(3, 8) == std::vector<int64_t>{1, 1, 1});
  CHECK(balanced_sizes(0, 3) == std::vector<int64_t>{0});
}

TEST_CASE("part_sizes are sizes or proportions") {
  const Devices count(2);
  CHECK(sizes_of({.part_sizes = {40, 24}}, 64) == std::vector<int64_t>{40, 24});
  CHECK(sizes_of({.part_sizes = {40, 24}}, 32) == std::vector<int64_t>{20, 12});
  CHECK(sizes_of({.part_sizes = {40, 24}}, 1) == std::vector<int64_t>{1, 0});
  CHECK(sizes_of({.part_sizes = {40, 24}}, 0) == std::vector<int64_t>{0, 0});
  CHECK(sizes_of({.replicas = 3, .part_sizes = {1, 1, 1}}, 8) == std::vector<int64_t>{3, 3, 2});
  CHECK(sizes_of({.replicas = 3, .part_sizes = {1, 0, 2}}, 7) == std::vector<int64_t>{2, 0, 5});
  CHECK_ERROR(sizes_of({.part_sizes = {1}}, 1), "[DataParallel]", "part_sizes has 1 entries for 2 replicas");
  CHECK_ERROR(sizes_of({.part_sizes = {2, -1}}, 1), "part_sizes has -1");
  CHECK_ERROR(sizes_of({.part_sizes = {0, 0}}, 1), "part_sizes are all 0");
  CHECK_ERROR(sizes_of({.replicas = -1}, 1), "replicas is -1", "1 to 4096");
}

TEST_CASE("scatter: views on their devices, with the gradient's way back") {
  const Devices count(3);
  Tensor x = arange(14).to(float32).view({7, 2}).requires_grad_();
  const auto parts = scatter(x, {0, 1, 2});
  REQUIRE(parts.size() == 3);
  CHECK(parts[0].shape() == Shape{3, 2});
  CHECK(parts[2].device() == Device("cpu:2"));
  CHECK(parts[1].const_data<float>() == x.const_data<float>() + 6);
  (sum(parts[0]) + sum(parts[1] * 2).to(Device("cpu:0")) + sum(parts[2] * 3).to(Device("cpu:0"))).backward();
  CHECK(equal(x.grad(), tensor({{1, 1}, {1, 1}, {1, 1}, {2, 2}, {2, 2}, {3, 3}, {3, 3}}, {.dtype = float32})));
  CHECK(scatter(x, {0, 1}, 1)[1].shape() == Shape{7, 1});
  CHECK(scatter(x, {0, 1, 2}, 0, std::vector<int64_t>{0, 7})[1].shape() == Shape{7, 2});
  const std::vector<Tensor> pair{x, arange(7)};
  const auto both = scatter(pair, {"cpu:2", "cpu:1"});
  REQUIRE(both.size() == 2);
  CHECK(equal(both[1][1], arange(4, 7).to(Device("cpu:1"))));
}

TEST_CASE("scatter refuses what cannot be divided") {
  const Devices count(2);
  const Tensor x = zeros({4, 2});
  CHECK_ERROR(scatter(x, {}), "[scatter]", "list of devices is empty");
  CHECK_ERROR(scatter(x, {0, 2}), "cpu:2 does not exist");
  CHECK_ERROR(scatter(zeros({}), {0, 1}), "a single number cannot be divided");
  CHECK_ERROR(scatter(x, {0, 1}, 0, std::vector<int64_t>{1, 2}), "the sizes sum to 3", "{4, 2} has 4");
  CHECK_ERROR(scatter(x, {0, 1}, 0, std::vector<int64_t>{5, -1}), "size -1 is negative");
  CHECK_ERROR(scatter(x, {0, 1}, 0, std::vector<int64_t>{1, 1, 2}), "3 sizes for 2 devices");
  CHECK_ERROR(scatter(std::vector<Tensor>{}, {0, 1}), "no tensors to divide");
  CHECK_ERROR(scatter(std::vector<Tensor>{x, zeros({3})}, {0, 1}), "differ in size along dimension 0", "{4, 2}", "{3}");
  CHECK_ERROR(scatter(std::vector<Tensor>{x, zeros({})}, {0, 1}), "a single number cannot be divided");
}

// pytorch#7956, #9811: gather fails on scalar outputs.
TEST_CASE("gather joins, makes a vector of single numbers, and is differentiable") {
  const Devices count(2);
  Tensor a = full({2, 1}, 1.0).requires_grad_(), b = full({1, 1}, 2.0, {.device = "cpu:1"}).requires_grad_();
  const Tensor y = parallel::gather(std::vector<Tensor>{a, b}, "cpu:0");
  CHECK(y.shape() == Shape{3, 1});
  CHECK(y.device() == Device("cpu:0"));
  sum(y * tensor({{1.0}, {2.0}, {3.0}}, {.dtype = float64})).backward();
  CHECK(equal(a.grad(), tensor({{1.0}, {2.0}}, {.dtype = float32})));
  CHECK(b.grad().item<double>() == 3);
  CHECK(b.grad().device() == Device("cpu:1"));
  CHECK(equal(parallel::gather(std::vector<Tensor>{sum(a), sum(b)}, "cpu:1"),
              tensor({2.0, 2.0}, {.dtype = float32, .device = "cpu:1"})));
  CHECK(parallel::gather(std::vector<Tensor>{zeros({2}), zeros({3}, {.device = "cpu:1"})}, "cpu:0", 1).shape() ==
        Shape{5});
  CHECK_FALSE(parallel::gather(std::vector<Tensor>{Tensor(), Tensor()}, "cpu:0").defined());
  const Tensor alone = parallel::gather(std::vector<Tensor>{b.detach()}, "cpu:0");
  CHECK(alone.const_data<float>() != b.const_data<float>());
  CHECK_ERROR(parallel::gather(std::vector<Tensor>{}, "cpu:0"), "[gather]", "no tensors to join");
  CHECK_ERROR(parallel::gather(std::vector<Tensor>{a, Tensor()}, "cpu:0"), "some parts are undefined");
  CHECK_ERROR(parallel::gather(std::vector<std::vector<Tensor>>{{a}, {a, b}}, "cpu:0"), "returned 1 and 2 tensors");
  CHECK_ERROR(parallel::gather(std::vector<Tensor>{a}, "cpu:7"), "cpu:7 does not exist");
}

TEST_CASE("replicate and parallel_apply: outputs stay where they are, gradients arrive") {
  const Devices count(2);
  auto net = make_net();
  const auto replicas = replicate(net, {0, 1});
  const Tensor x = randn({5, 6}, {.dtype = float64});
  const auto outputs = parallel_apply(*replicas, scatter(std::vector<Tensor>{x}, {0, 1}));
  CHECK(outputs[1][0].device() == Device("cpu:1"));
  outputs[1][0].backward(ones({2, 4}, {.dtype = float64, .device = "cpu:1"}));  // only one replica has a gradient
  const Tensor second = net->parameters()[0].grad().clone();
  CHECK(second.device() == Device("cpu:0"));
  outputs[0][0].backward(ones({3, 4}, {.dtype = float64}));
  auto alone = make_net();
  sum((*alone)(x.narrow(0, 3, 2))).backward();
  CHECK_CLOSE(second, alone->parameters()[0].grad(), 1e-12);
  sum((*alone)(x.narrow(0, 0, 3))).backward();
  CHECK_CLOSE(net->parameters()[0].grad(), alone->parameters()[0].grad(), 1e-12);
  CHECK_ERROR(parallel_apply(*replicas, std::vector<std::vector<Tensor>>(3)), "[parallel_apply]",
              "inputs for 3 replicas, but only 2");
  CHECK_ERROR(replicate(nullptr, {0, 1}), "[replicate]", "the module is empty");
  CHECK_ERROR(replicate(net, {}), "list of devices is empty");
  CHECK_ERROR(replicate(net, {1, 0}), "'0.weight' is on cpu:0", "call module->to(\"cpu:1\")");
}

// pytorch#19540, PR#20910: the functional form never trained its module.
TEST_CASE("data_parallel trains as one device does") {
  const Devices count(3);
  auto net = make_net(), alone = make_net();
  optim::SGD a(net->parameters(), {.lr = 0.1}), b(alone->parameters(), {.lr = 0.1});
  manual_seed(5);
  for (int i = 0; i < 20; ++i) {
    const Tensor x = randn({7, 6}, {.dtype = float64}), y = randint(0, 4, {7});
    cross_entropy(data_parallel(net, x), y).backward();
    cross_entropy((*alone)(x), y).backward();
    a.step();
    b.step();
    a.zero_grad();
    b.zero_grad();
  }
  check_equal_weights(net->parameters(), alone->parameters());
  CHECK_FALSE(net->parameters()[0].identity()->replicas);  // nothing is left of the replicas
  CHECK(data_parallel(net, zeros({4, 6}, {.dtype = float64}), {.output_device = "cpu:2"}).device() == Device("cpu:2"));
  CHECK_ERROR(data_parallel(nullptr, zeros({1})), "[data_parallel]", "the module is empty");
}
