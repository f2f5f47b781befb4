// The model of the benchmarks.
#pragma once
#include <memory>

#include <tandem/tandem.h>

namespace bench {

/// 784 inputs, `layers` hidden layers of `width` with ReLU, 10 outputs.
inline std::shared_ptr<tandem::nn::SequentialImpl> make_mlp(int layers, std::int64_t width) {
  using namespace tandem;
  auto net = std::make_shared<nn::SequentialImpl>();
  std::int64_t in = 784;
  for (int i = 0; i < layers; ++i) {
    net->push_back(nn::Linear(in, width));
    net->push_back(nn::ReLU());
    in = width;
  }
  net->push_back(nn::Linear(in, 10));
  return net;
}

/// Adam, or plain SGD.
inline std::unique_ptr<tandem::optim::Optimizer> make_optimizer(bool adam,
                                                                const std::vector<tandem::Tensor>& parameters,
                                                                double lr) {
  using namespace tandem;
  if (adam) return std::make_unique<optim::Adam>(parameters, optim::AdamOptions{.lr = lr});
  return std::make_unique<optim::SGD>(parameters, optim::SGDOptions{.lr = lr});
}

}  // namespace bench
