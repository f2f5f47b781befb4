// DataParallel: one process trains on several devices, a thread for each. The one module object is called by all
// threads; in thread i its parameters stand for replica i's data.
#pragma once
#include <memory>
#include <vector>

#include <tandem/nn/loss.h>
#include <tandem/nn/module.h>

namespace tandem::parallel {

/// Which devices take part, and where the outputs go.
struct DataParallelOptions {
  DeviceIds device_ids = {};    // default: all devices of the model's type
  DeviceId output_device = -1;  // default: the first of device_ids
  int dim = 0;                  // the dimension along which inputs are cut and outputs are joined
};

/// Wraps a module whose parameters are on the first of the devices. Names of parameters are the module's own: a file
/// saved in any mode loads in any other. Gradients reach the module's parameters through backward only: for
/// autograd::grad of an output, they are other tensors than those of the graph. Several threads may call the wrapper at
/// once, unless the module has buffers: all of them would write to the replicas' one copy of those.
class DataParallel : public nn::Module {
 public:
  /// Throws Error when a device does not exist or is listed twice, a parameter is not on the first one, or the
  /// module contains a DataParallel.
  explicit DataParallel(std::shared_ptr<nn::Module> module, const DataParallelOptions& options = {});
  ~DataParallel() override;
  /// Cuts the input into parts whose sizes differ by at most one, runs each on its device, and joins the outputs on the
  /// output device. With fewer rows than devices only some work. The sum of the replicas' gradients is added to the
  /// module's parameters at the end of backward.
  Tensor forward(const Tensor& x) override;
  std::vector<Tensor> forward_all(std::span<const Tensor> inputs) override;
  /// criterion(model(x), y) with the outputs never leaving their devices: targets are cut too, each device computes its
  /// part of the loss, and sums and normalisers are combined. Equals the loss of the whole batch, also with class
  /// weights, ignored labels and uneven parts. Not for Reduction::none.
  Tensor loss(const nn::Loss& criterion, const Tensor& x, const Tensor& y);
  const std::vector<Device>& devices() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tandem::parallel
