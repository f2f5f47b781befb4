// DistributedDataParallel: one process a device; every process trains the same model on its own part of the batch, and
// gradients are averaged while backward runs.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <tandem/nn/loss.h>
#include <tandem/nn/module.h>
#include <tandem/parallel/comm_hook.h>
#include <tandem/parallel/join.h>
#include <tandem/parallel/reducer.h>
#include <tandem/tensor/callable.h>

namespace tandem::parallel {

/// How a model is wrapped. All ranks give the same.
struct DistributedDataParallelOptions {
  DeviceIds device_ids = {};                              // at most one: where the model is
  std::shared_ptr<ProcessGroup> process_group = nullptr;  // default: all ranks
  double bucket_cap_mb = 25;                              // of gradients that travel together, in MiB
  bool find_unused_parameters = false;                    // for models whose forward leaves out some now and then
  bool broadcast_buffers = true;  // every synchronised forward in training mode begins with rank 0's buffers
  double first_bucket_mb = 1;     // smaller, so that it is under way early
  std::int64_t check_every = 0;   // every so many synchronised forwards the parameters are compared; 0: never
  // S, a power of two that the number of ranks divides: trains through `loss` alone, in S parts, with the same bits on
  // any number of ranks, and of devices of a DataParallel with the same S. Every rank then gives the whole batch, and
  // gets its loss; the bucket sizes and no_sync are not for it. 0: off.
  int reproducible_shards = 0;
};

/// What a wrapper tells about itself: its bucket plan, and where the last step's time went, in seconds.
struct LoggingData {
  std::vector<Reducer::Bucket> buckets;    // in the order in which they are launched
  bool rebuilt = false;                    // in the order in which gradients arrived on rank 0
  std::vector<std::string> arrival_order;  // of the gradients of the last backward
  double forward = 0;
  double backward = 0;       // computing, from the output to the last gradient
  double communication = 0;  // while at least one bucket was under way
  double overlap = 0;        // the part of it that lies within backward
  double exposed = 0;        // waiting after backward
};

/// Wraps a module. Names of parameters are the module's own: a file saved in any mode loads in any other.
///
/// A backward through the output ends with the gradient of every parameter averaged over the ranks, what had been
/// accumulated before included. Gradients live in buckets: a handle on one that is kept over zero_grad() sees the next
/// one, and clone() keeps its values. A hook of register_hook sees the gradient of this rank, and keeps it by clone();
/// a post-accumulate hook must not touch it, since it is under way. A loss that does not go through the output
/// synchronises nothing, nor does autograd::grad. All ranks run the same forwards and backwards in the same order; two
/// wrapped models that one backward goes through in an order of its own on each rank need a process group each. Wrapped
/// models that share a parameter need a backward each: one through both ends with an Error on every rank.
class DistributedDataParallel : public nn::Module {
 public:
  /// Checks that all ranks wrap the same model, and copies rank 0's parameters and buffers to all. Needs
  /// init_process_group first. Throws CommError that names the first difference between the ranks. The first step of an
  /// optimizer of these parameters checks that they, its settings and its state are alike on all ranks.
  explicit DistributedDataParallel(std::shared_ptr<nn::Module> module,
                                   const DistributedDataParallelOptions& options = {});
  ~DistributedDataParallel() override;
  /// Runs the module on this rank's input. Where a parameter gets no gradient in a backward, that backward ends with an
  /// Error on every rank that names it, unless find_unused_parameters. Throws Error when a parameter was frozen,
  /// unfrozen, converted, moved or added since wrapping. With check_every = N, every N-th synchronised forward begins
  /// with a comparison of a hash of the parameters: where they are not the same bits on all ranks, CommError on every
  /// rank that names the first parameter, the rank, the element and both values.
  Tensor forward(const Tensor& x) override;
  std::vector<Tensor> forward_all(std::span<const Tensor> inputs) override;

  /// criterion(model(x), y), scaled so that the averaged gradient is that of the loss of all ranks' rows together: for
  /// a mean also when ranks have different numbers of rows or none, for Reduction::sum the gradient of the whole sum.
  /// The average over the ranks of the values is the value for all rows: all_reduce(value, {.op = ReduceOp::avg}) of
  /// value = loss.detach().clone() gives it. A mean adds up its normaliser over the ranks, also under no_sync and
  /// NoGradGuard: all ranks call it equally often. That number is sent before the forward where the targets tell it.
  /// Error for Reduction::none. With reproducible_shards every rank gives the whole batch and gets its loss; the input
  /// must not require grad, and gradients reach the parameters through backward alone.
  Tensor loss(const nn::Loss& criterion, const Tensor& x, const Tensor& y);
  /// The same for any function of output and target that gives one number: the mean over the rows of y, or their sum.
  Tensor loss(FunctionRef<Tensor(const Tensor&, const Tensor&)> function, Reduction reduction, const Tensor& x,
              const Tensor& y);

  /// Gradients are averaged by this hook from now on. Every rank calls it, once, before the first backward, with a hook
  /// of the same name. Error for a hook that is empty, comes too late or is the second. The first backward compares the
  /// names, and whether there is a hook: CommError on every rank when they differ.
  void register_comm_hook(CommHook hook);

 private:
  struct State;

 public:
  /// While it lives, forwards are not synchronised: their backwards add to this rank's gradients alone, and the next
  /// synchronised backward averages the sums. `loss` still adds up its normaliser.
  class [[nodiscard]] NoSync {
   public:
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    friend DistributedDataParallel;
    explicit NoSync(std::shared_ptr<State> state);
    std::shared_ptr<State> state_;
    bool before_;
  };
  NoSync no_sync();

  /// parallel::join in the model's group: runs `body`, this rank's loop, where ranks have different numbers of batches.
  /// While others go on, this rank adds nothing to their gradients but what no_sync has left in its own; with
  /// divide_by_initial_world_size = false, for a backward that is not of loss, not even that. Its gradients are the
  /// averages, too. Buffers are those of the lowest rank that has batches.
  int join(FunctionRef<void()> body, const JoinOptions& options = {});

  LoggingData logging_data() const;
  /// What is wrapped.
  const std::shared_ptr<nn::Module>& module() const;
  /// The number of ranks and the backend.
  std::string extra() const override;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace tandem::parallel
