// A short training run that needs every kind of order between host, streams and devices: two devices, batches copied
// from page-locked memory while the program goes on, results read back into such memory. Ends with 1 and says why when
// its losses are not the CPU's. negative_test.py runs it while the double of CUDA drops calls.
#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

#include <tandem/autograd/functions.h>
#include <tandem/nn/layers.h>
#include <tandem/nn/loss.h>
#include <tandem/optim/sgd.h>
#include <tandem/parallel/data_parallel.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/cuda.h>
#include <tandem/tensor/random.h>

using namespace tandem;

namespace {

constexpr int kSteps = 6, kRows = 24, kFeatures = 96, kClasses = 5;

struct Net : nn::Module {
  std::shared_ptr<nn::LinearImpl> first = register_module("first", std::make_shared<nn::LinearImpl>(kFeatures, 64));
  std::shared_ptr<nn::LinearImpl> last = register_module("last", std::make_shared<nn::LinearImpl>(64, kClasses));
  Tensor forward(const Tensor& x) override { return (*last)(relu((*first)(x))); }
};

// Numbers that depend on the order of all that is done.
std::vector<double> train(bool on_cuda) {
  manual_seed(3);
  auto net = std::make_shared<Net>();
  std::vector<Tensor> inputs, labels;
  for (int step = 0; step < kSteps; ++step) {
    inputs.push_back(randn({kRows, kFeatures}));
    labels.push_back(randint(0, kClasses, {kRows}));
  }
  const Device device = on_cuda ? Device("cuda:0") : Device("cpu");
  net->to(device);
  std::vector<Device> devices{device};
  if (on_cuda) devices.emplace_back("cuda:1");
  parallel::DataParallel model(net, {.device_ids = devices});
  optim::SGD optimizer(net->parameters(), {.lr = 0.1, .momentum = 0.9});
  const nn::CrossEntropyLoss criterion;

  // Batches are copied ahead, each from page-locked memory that is given back at once.
  if (on_cuda)
    for (Tensor& x : inputs) x = cuda::pin_memory(x).to(device, true);
  // A place of its own for the labels, which each step fills anew, and one for the losses.
  Tensor given = labels.front().clone(), read = zeros({});
  if (on_cuda) given = cuda::pin_memory(given), read = cuda::pin_memory(read);
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const auto at = static_cast<std::size_t>(step);
    given.copy_(labels[at]);
    const Tensor y = given.to(device);
    optimizer.zero_grad();
    const Tensor loss = model.loss(criterion, inputs[at], y);
    loss.backward();
    optimizer.step();
    read.copy_(loss.detach());
    losses.push_back(read.item<double>());
  }

  // Memory that is copied from without waiting, and written to after the host's own wait.
  Tensor source = full({1 << 16}, 1.0);
  if (on_cuda) source = cuda::pin_memory(source);
  const Tensor copied = on_cuda ? source.to(device, true) : source.clone();
  if (on_cuda) cuda::synchronize(device);
  source.fill_(2.0);
  losses.push_back(mean(copied).to("cpu").item<double>());
  return losses;
}

}  // namespace

int main() {
  try {
    const std::vector<double> expected = train(false), found = train(true);
    for (std::size_t i = 0; i < expected.size(); ++i)
      if (!(std::abs(found[i] - expected[i]) <= 1e-5)) {
        std::printf("number %zu is %.8f, and %.8f on the CPU\n", i, found[i], expected[i]);
        return 1;
      }
  } catch (const std::exception& e) {
    std::printf("error: %s\n", e.what());
    return 1;
  }
  std::puts("all as on the CPU");
  return 0;
}
