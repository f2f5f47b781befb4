// A small training on a CUDA device, for the tests of graphs.
#pragma once
#include <memory>
#include <vector>

#include <tandem/nn/layers.h>
#include <tandem/nn/loss.h>
#include <tandem/optim/adam.h>
#include <tandem/optim/sgd.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/cuda.h>
#include <tandem/tensor/cuda_graph.h>
#include <tandem/tensor/random.h>
#include <tandem/tests/cuda/cuda_device.h>

namespace tandem::test {

inline const Device kOther{DeviceType::cuda, 1};
inline const bool kSeveral = cuda::device_count() > 1;  // a real machine may have one

struct Net : nn::Module {
  std::shared_ptr<nn::LinearImpl> first = register_module("first", std::make_shared<nn::LinearImpl>(8, 16));
  std::shared_ptr<nn::DropoutImpl> drop = register_module("drop", std::make_shared<nn::DropoutImpl>(0.3));
  std::shared_ptr<nn::LinearImpl> last = register_module("last", std::make_shared<nn::LinearImpl>(16, 5));
  Tensor forward(const Tensor& x) override { return (*last)((*drop)(relu((*first)(x)))); }
};

enum class Method { sgd, momentum, adam, amsgrad, adamw };
inline std::unique_ptr<optim::Optimizer> make_optimizer(Method method, std::vector<Tensor> parameters) {
  if (method == Method::sgd) return std::make_unique<optim::SGD>(parameters, optim::SGDOptions{.lr = 0.05});
  if (method == Method::momentum)
    return std::make_unique<optim::SGD>(parameters,
                                        optim::SGDOptions{.lr = 0.05, .momentum = 0.9, .weight_decay = 0.01});
  if (method == Method::adamw)
    return std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions{.lr = 0.02, .weight_decay = 0.1});
  return std::make_unique<optim::Adam>(parameters,
                                       optim::AdamOptions{.lr = 0.02, .amsgrad = method == Method::amsgrad});
}

// A model, its data on the device, and a step of it.
struct Training {
  explicit Training(Method method = Method::adam) {
    net->to(kCuda);
    optimizer = make_optimizer(method, net->parameters());
  }
  void next_batch() {
    x.copy_(randn({6, 8}));
    y.copy_(randint(0, 5, {6}));
  }
  void step() {
    optimizer->zero_grad();
    loss = criterion((*net)(x), y);
    loss.backward();
    optimizer->step();
  }
  void warm_up() {
    for (int i = 0; i < 3; ++i) {
      next_batch();
      step();
    }
  }
  void capture() {
    graph.capture([this] { step(); });
  }

  std::shared_ptr<Net> net = std::make_shared<Net>();
  std::unique_ptr<optim::Optimizer> optimizer;
  nn::CrossEntropyLoss criterion;
  Tensor x = zeros({6, 8}, {.device = kCuda}), y = zeros({6}, {.dtype = int64, .device = kCuda}), loss;
  cuda::Graph graph{kCuda};
};

}  // namespace tandem::test
