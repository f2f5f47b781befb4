// Optimizer steps on CUDA against the CPU's, through the optimizers.
#include <tandem/tests/cuda/cuda_device.h>
#include <tandem/tests/support/test.h>

#include <functional>
#include <memory>

#include <tandem/nn/utils.h>
#include <tandem/optim/adam.h>
#include <tandem/optim/lr_scheduler.h>
#include <tandem/optim/sgd.h>
#include <tandem/tensor/random.h>

namespace tandem::test {
namespace {

using Make = std::function<std::unique_ptr<optim::Optimizer>(std::vector<Tensor>)>;

// Sizes around a chunk of the kernel, none at all, and enough parameters for several kernels.
std::vector<Tensor> parameters(Device device, DType dtype) {
  manual_seed(5);
  std::vector<Tensor> all;
  for (int i = 0; i < 70; ++i) all.push_back(randn({i % 7, 3}, {.dtype = dtype}));
  for (const int64_t n : {1, 1023, 1024, 1025, 5000}) all.push_back(randn({n}, {.dtype = dtype}));
  for (Tensor& p : all) p = p.to(device).requires_grad_();
  return all;
}

// Parameters and state after five steps; parameter 3 has its first gradient in the second.
std::vector<Tensor> trained(const Make& make, Device device, DType dtype) {
  std::vector<Tensor> all = parameters(device, dtype);
  const auto optimizer = make(all);
  optim::StepLR schedule(*optimizer, 2, 0.5);
  for (int step = 0; step < 5; ++step) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Tensor g = randn(all[i].shape(), {.dtype = dtype});
      if (step > 0 || i != 3) all[i].set_grad(g.to(device));
    }
    optimizer->step();
    optimizer->zero_grad();
    schedule.step();
  }
  std::vector<Tensor> result;
  for (const Tensor& p : all) result.push_back(p.detach().to("cpu"));
  for (const auto& [name, value] : optimizer->state_dict()) result.push_back(value.detach().to("cpu"));
  return result;
}

void compare(const Make& make) {
  for (const DType dtype : {float32, float64}) {
    const std::vector<Tensor> host = trained(make, Device(), dtype), device = trained(make, kCuda, dtype);
    REQUIRE(host.size() == device.size());
    for (std::size_t i = 0; i < host.size(); ++i) {
      INFO("result ", i);
      CHECK(allclose(device[i], host[i], dtype == float32 ? 1e-5 : 1e-12, dtype == float32 ? 1e-6 : 1e-13));
    }
  }
}

template <class Method, class Options>
Make maker(const Options& options) {
  return [options](std::vector<Tensor> all) { return std::make_unique<Method>(std::move(all), options); };
}

}  // namespace

TEST_CASE("cuda: SGD") {
  using Options = optim::SGDOptions;
  for (const Options& options :
       {Options{.lr = 0.1}, Options{.lr = 0.1, .weight_decay = 0.1}, Options{.lr = 0.1, .momentum = 0.9},
        Options{.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.1},
        Options{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true}})
    compare(maker<optim::SGD>(options));
}

TEST_CASE("cuda: Adam and AdamW") {
  for (const double decay : {0.0, 0.1}) {
    for (const bool amsgrad : {false, true}) {
      compare(maker<optim::Adam>(optim::AdamOptions{.lr = 0.01, .weight_decay = decay, .amsgrad = amsgrad}));
      compare(maker<optim::AdamW>(optim::AdamWOptions{.lr = 0.01, .weight_decay = decay, .amsgrad = amsgrad}));
    }
  }
}

TEST_CASE("cuda: groups, and state that moves between devices") {
  const auto all = parameters(kCuda, float32);
  optim::Adam optimizer({{.params = {all[74]}}, {.params = {all[73], all[72]}, .lr = 0.5}}, {.lr = 0.1});
  const auto set = [&] {
    for (const Tensor& p : all) Tensor(p).set_grad(ones_like(p));
  };
  const Tensor before = all[73].detach().to("cpu");
  set();
  optimizer.step();
  CHECK_CLOSE(before - all[73].detach().to("cpu"), full(before.shape(), 0.5), 1e-5);
  NamedTensors state = optimizer.state_dict();
  for (auto& [name, value] : state) value = value.detach().to("cpu");
  optim::Adam second({{.params = {all[74]}}, {.params = {all[73], all[72]}}});
  second.load_state_dict(state);
  set();
  second.step();
  CHECK(second.state_dict()[1].second.device() == kCuda);
  CHECK_CLOSE(before - all[73].detach().to("cpu"), full(before.shape(), 1.0), 1e-5);
}

}  // namespace tandem::test
