// DataParallel: one process trains on several devices, a thread for each. The one module object is called by all
// threads; in thread i its parameters stand for replica i's data.
#pragma once
#include <memory>
#include <vector>

#include <tandem/nn/loss.h>
#include <tandem/nn/module.h>
#include <tandem/parallel/phases.h>
#include <tandem/parallel/placement.h>
#include <tandem/tensor/callable.h>

namespace tandem::parallel {

/// Wraps a module whose parameters are on the first of the devices. Names of parameters are the module's own: a file
/// saved in any mode loads in any other. Gradients reach the module's parameters through backward only: for
/// autograd::grad of an output, they are other tensors than those of the graph. On one device it calls the module as it
/// is. Several threads may call the wrapper at once, unless the module has buffers: all of them would write to the
/// replicas' one copy of those. One thread's backward may add what another's has computed, so gradients are complete,
/// and may be read, when the backwards of all threads have returned.
class DataParallel : public nn::Module {
 public:
  /// Throws Error when a device does not exist or is listed twice, a parameter is not on the first one, or the
  /// module contains a DataParallel or DistributedDataParallel.
  explicit DataParallel(std::shared_ptr<nn::Module> module, const DataParallelOptions& options = {});
  ~DataParallel() override;
  /// Cuts the input, which may be on any device, into a part for each replica, runs each on its device, and joins the
  /// outputs on the output device; single numbers become a vector. With fewer rows than replicas only some work. The
  /// sum of the replicas' gradients is added to the module's parameters at the end of backward.
  Tensor forward(const Tensor& x) override;
  std::vector<Tensor> forward_all(std::span<const Tensor> inputs) override;
  /// criterion(model(x), y) with the outputs never leaving their devices: targets are cut too, each device computes its
  /// part of the loss, and sums and normalisers are combined. Equals the loss of the whole batch, also with class
  /// weights, ignored labels and uneven parts. With Reduction::none the rows' losses are joined; with
  /// reproducible_shards that is an Error, and this is the one way to train.
  Tensor loss(const nn::Loss& criterion, const Tensor& x, const Tensor& y);
  /// The same for any function of an output and its target. `reduction` says what it gives for the rows of a part:
  /// their mean, which is weighted by their number, their sum, or one number a row.
  Tensor loss(FunctionRef<Tensor(const Tensor&, const Tensor&)> function, Reduction reduction, const Tensor& x,
              const Tensor& y);
  /// What is wrapped.
  const std::shared_ptr<nn::Module>& module() const;
  /// The distinct devices, the first of which has the module's own parameters.
  const std::vector<Device>& devices() const;
  /// Where the time of the last step went: the last forward or loss, and the backward after it.
  Phases phases() const;
  /// The devices, and how to get more.
  std::string extra() const override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem::parallel
