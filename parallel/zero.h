// ZeroRedundancyOptimizer: an optimizer whose state is divided among the ranks. Each rank updates its part of the
// parameters and keeps the state of that part alone; then all get all parameters.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <tandem/optim/optimizer.h>
#include <tandem/parallel/comm/process_group.h>
#include <tandem/tensor/callable.h>

namespace tandem::parallel {

/// Wraps any optimizer that treats each element by itself, such as SGD, Adam and AdamW: the result has the same bits as
/// that optimizer alone. Parameters, one after the other, are cut into a share of equal size for each rank, between any
/// two cache lines, so that a rank has 1/n of the state, and at most 64 bytes a parameter more.
///
/// Parameters and gradients are alike on all ranks, as DistributedDataParallel sees to, and all ranks call the same
/// functions in the same order. In a join, ranks without batches update their part with the gradients and the settings
/// of a rank that has batches; state_dict and gather_state are called outside of it. The parameters move to memory of
/// the group, from which they are shared without a copy: a view of one that was made before does not see the updates.
class ZeroRedundancyOptimizer final : public Stateful {
 public:
  /// Makes the optimizer of this rank. It gets a vector for each parameter, in their order: the elements that this rank
  /// updates, which may be none. It may put them into groups, in their order.
  using Factory = FunctionRef<std::unique_ptr<optim::Optimizer>(std::vector<Tensor> slices)>;
  /// Every rank calls it. Throws Error for parameters that an optimizer would refuse, or that are not the CPU's, and
  /// for an optimizer that is not made of all slices in their order; then the others get a CommError with the reason.
  /// CommError on every rank where the parameters, the kind of optimizer or its settings differ between ranks.
  ZeroRedundancyOptimizer(std::vector<Tensor> parameters, Factory factory,
                          std::shared_ptr<ProcessGroup> group = nullptr);
  /// With one group of parameters: make<optim::Adam>(model.parameters(), {.lr = 1e-3}).
  template <class Inner>
  static ZeroRedundancyOptimizer make(std::vector<Tensor> parameters, const typename Inner::Options& options = {},
                                      std::shared_ptr<ProcessGroup> group = nullptr) {
    return ZeroRedundancyOptimizer(
        std::move(parameters),
        [&](std::vector<Tensor> slices) { return std::make_unique<Inner>(std::move(slices), options); },
        std::move(group));
  }
  ~ZeroRedundancyOptimizer() override;
  ZeroRedundancyOptimizer(const ZeroRedundancyOptimizer&) = delete;
  ZeroRedundancyOptimizer& operator=(const ZeroRedundancyOptimizer&) = delete;

  /// Updates every parameter that has a gradient, on all ranks. Throws Error when a parameter was moved or converted
  /// since the optimizer was made, or no longer fits its gradient; the others then get a CommError with the reason.
  /// CommError on every rank, and nothing is changed, where a setting or a missing gradient is not the same on all of
  /// them, or at the first step a parameter.
  /// After an error the ranks may differ: load a checkpoint.
  void step();
  /// Makes all gradients undefined.
  void zero_grad();
  const std::vector<Tensor>& parameters() const { return parameters_; }
  const std::shared_ptr<ProcessGroup>& group() const { return group_; }
  /// The optimizer of this rank's slices: for schedules, which set its learning rate.
  optim::Optimizer& local() { return *local_; }

  std::size_t group_count() const { return local_->group_count(); }
  double lr(std::size_t group = 0) const { return local_->lr(group); }
  /// Every rank sets the same.
  void set_lr(std::size_t group, double lr) { local_->set_lr(group, lr); }
  void set_lr(double lr) { local_->set_lr(lr); }

  std::string state_name() const override { return "optimizer"; }
  /// The whole state, as the optimizer alone would have it, in new memory. It is gathered from all ranks: every rank
  /// calls it. CommError on every rank where their settings or numbers of steps differ.
  NamedTensors state_dict() const override;
  /// The same for rank `root` of the group alone; empty elsewhere. Every rank calls it. save_checkpoint does.
  NamedTensors gather_state(int root) const;
  std::vector<std::string> state_problems(const NamedTensors& state) const override;
  /// Takes this rank's part of a whole state, which may be from any number of ranks, or of the optimizer alone. Every
  /// rank loads the same.
  void load_state_dict(const NamedTensors& state) override;

 private:
  // Where a parameter lies, and which of its elements this rank updates.
  struct Place {
    std::size_t line = 0;
    std::int64_t offset = 0;          // in the line, in elements
    std::int64_t begin = 0, end = 0;  // of this rank's elements
    Tensor slice = {}, memory = {};   // this rank's elements; all of them, apart from the parameter
  };
  // The parameters of one type, each from the start of a cache line on, and after them what makes the shares equal.
  struct Line {
    DType dtype = float32;
    std::int64_t count = 0, share = 0;  // elements in all, and of a rank
    Tensor whole = {};
  };
  void plan();
  void move_parameters();
  void take_over_step(int from, bool ended);
  void take_gradients();
  void step_own_share();
  void verify_step();
  void share_parameters();
  NamedTensors gather(bool everywhere, int root) const;
  NamedTensors cut(const NamedTensors& state, std::vector<std::string>& problems) const;

  std::shared_ptr<ProcessGroup> group_;
  std::vector<Tensor> parameters_;
  std::vector<Place> places_;  // by parameter
  Device home_ = {};           // of the lines: the GPU of the parameters, or the CPU
  std::vector<Line> lines_;
  std::unique_ptr<optim::Optimizer> local_;
  bool compared_ = false;  // the parameters of the ranks
  struct InJoin;
  std::unique_ptr<InJoin> in_join_;
};

}  // namespace tandem::parallel
