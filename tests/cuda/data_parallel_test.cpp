// DataParallel on CUDA devices against one CPU device.
#include <tandem/tests/support/test.h>

#include <tandem/nn/layers.h>
#include <tandem/nn/loss.h>
#include <tandem/optim/adam.h>
#include <tandem/optim/sgd.h>
#include <tandem/parallel/data_parallel.h>
#include <tandem/tensor/cuda.h>
#include <tandem/tensor/random.h>

namespace tandem {
namespace {

struct Net : nn::Module {
  std::shared_ptr<nn::LinearImpl> first = register_module("first", std::make_shared<nn::LinearImpl>(12, 16));
  std::shared_ptr<nn::LinearImpl> last = register_module("last", std::make_shared<nn::LinearImpl>(16, 5));
  Tensor forward(const Tensor& x) override { return (*last)(relu((*first)(x))); }
};

// Losses of some steps, on as many devices; 0 devices: the plain model on the CPU.
std::vector<double> train(int devices, int replicas, bool adam) {
  manual_seed(3);
  auto net = std::make_shared<Net>();
  const Tensor x = randn({22, 12}), y = randint(0, 5, {22});
  const Device device = devices == 0 ? Device("cpu") : Device("cuda:0");
  net->to(device);
  parallel::DataParallelOptions options{.replicas = replicas};
  std::vector<Device> ids;
  for (int i = 0; i < std::max(devices, 1); ++i) ids.emplace_back(device.type(), i);
  options.device_ids = ids;
  parallel::DataParallel model(net, options);
  std::unique_ptr<optim::Optimizer> optimizer;
  if (adam)
    optimizer = std::make_unique<optim::Adam>(net->parameters(), optim::AdamOptions{.lr = 0.01});
  else
    optimizer = std::make_unique<optim::SGD>(net->parameters(), optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
  const nn::CrossEntropyLoss criterion;
  std::vector<double> losses;
  for (int step = 0; step < 6; ++step) {
    optimizer->zero_grad();
    const Tensor loss = model.loss(criterion, x.to(device), y.to(device));
    loss.backward();
    optimizer->step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

void check_same(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) CHECK(a[i] == doctest::Approx(b[i]).epsilon(1e-5));
}

TEST_CASE("cuda: DataParallel on 1 to 4 devices trains as the CPU does") {
  for (const bool adam : {false, true}) {
    const std::vector<double> expected = train(0, 1, adam);
    CHECK(expected.back() < expected.front());
    for (const int devices : {1, 2, 3, 4}) {
      CAPTURE(devices);
      if (devices > cuda::device_count()) continue;  // on real ones
      check_same(train(devices, 0, adam), expected);
    }
    check_same(train(1, 2, adam), expected);  // two replicas on one device
    if (cuda::device_count() > 1) check_same(train(2, 4, adam), expected);
  }
}

TEST_CASE("cuda: DataParallel's phases are timed, and bytes through device 0 counted" *
          doctest::skip(cuda::device_count() < 2)) {
  auto net = std::make_shared<Net>();
  net->to("cuda:0");
  parallel::DataParallel model(net, {.device_ids = {0, 1}});
  const Tensor x = randn({8, 12}).to("cuda:0");
  sum(model(x)).backward();
  const parallel::Phases phases = model.phases();
  CHECK(phases.forward > 0);
  CHECK(phases.backward > 0);
  CHECK(phases.reduce > 0);
  CHECK(phases.bytes_through_device_0 > 0);
}

TEST_CASE("cuda: a wrong label in any replica's part is an error where the loss is read") {
  if (cuda::device_count() < 4) return;
  auto net = std::make_shared<Net>();
  net->to("cuda:0");
  parallel::DataParallel model(net, {.device_ids = {0, 1, 2, 3}});
  const nn::CrossEntropyLoss criterion;
  for (const int64_t row_of_all : {0, 3, 7}) {
    Tensor labels = zeros({8}, {.dtype = int64});
    labels.data<int64_t>()[row_of_all] = 5;
    const Tensor loss = model.loss(criterion, randn({8, 12}).to("cuda:0"), labels.to("cuda:0"));
    loss.backward();
    const std::string row = fmt::format("[cross_entropy] label 5 at row {} is out of range", row_of_all % 2);
    const std::string where = fmt::format("; found on cuda:{}, whose rows are counted", row_of_all / 2);
    CHECK_ERROR(loss.item<double>(), row.c_str(), row_of_all < 2 ? "ignore_index" : where.c_str());
  }
  CHECK_ERROR(memory_stats("cuda:9"), "[memory_stats] cuda:9 does not exist");
}

}  // namespace
}  // namespace tandem
