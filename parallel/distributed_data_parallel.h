// DistributedDataParallel: one process a device; every process trains the same model on its own part of the batch, and
// gradients are averaged inside backward.
#pragma once
#include <memory>

#include <tandem/nn/loss.h>
#include <tandem/nn/module.h>
#include <tandem/parallel/comm/process_group.h>

namespace tandem::parallel {

/// Where the model is, and which ranks train it together.
struct DistributedDataParallelOptions {
  DeviceIds device_ids = {};                              // at most one: where the model is
  std::shared_ptr<ProcessGroup> process_group = nullptr;  // default: all ranks
};

/// Wraps a module. Names of parameters are the module's own: a file saved in any mode loads in any other.
class DistributedDataParallel : public nn::Module {
 public:
  /// Copies rank 0's parameters and buffers to all ranks. Needs init_process_group first; every rank must wrap the same
  /// model.
  explicit DistributedDataParallel(std::shared_ptr<nn::Module> module,
                                   const DistributedDataParallelOptions& options = {});
  /// Runs the module on this rank's input. A backward through the output ends with every parameter's gradient averaged
  /// over the ranks; a parameter that got none is an error that names it.
  Tensor forward(const Tensor& x) override;
  std::vector<Tensor> forward_all(std::span<const Tensor> inputs) override;
  /// criterion(model(x), y), scaled so that the averaged gradient is that of the loss of all ranks' rows together, also
  /// when ranks have different numbers of rows or none. The mean of its value over the ranks is that loss.
  Tensor loss(const nn::Loss& criterion, const Tensor& x, const Tensor& y);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tandem::parallel
