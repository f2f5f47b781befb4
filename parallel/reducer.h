// The reducer: averages the gradients of a model over the ranks, bucket by bucket, while backward still runs.
#pragma once
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <tandem/parallel/comm_hook.h>
#include <tandem/tensor/callable.h>
#include <tandem/tensor/io/state.h>

namespace tandem::parallel {

/// Gradients in buckets. Each parameter's gradient is written straight into its place in a bucket, and stays there.
///
/// Note [Launch order]: in every backward that it is armed for, each rank starts exactly one collective for each
/// bucket, in the order of the plan, which is the same on all ranks. A bucket is launched when it is complete and all
/// before it have been launched. A rank that cannot complete a bucket starts ProcessGroup::fail in its place: the
/// others get the reason, and the ranks stay in step whatever goes wrong on one of them. What a communication hook
/// starts after that first collective of a bucket is started within wait, bucket by bucket: see Note [Continuations].
class Reducer {
 public:
  /// The parameters that require grad, in the order in which they are registered, the same on all ranks. The first plan
  /// takes them in reverse. With `rebuild` it is replaced at the second backward by one in the order in which gradients
  /// arrived in the first on the lowest rank whose backward it was.
  Reducer(NamedTensors parameters, std::shared_ptr<ProcessGroup> group, std::vector<std::int64_t> caps, bool rebuild);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  /// Buckets are averaged by the hook from now on. Error when there is one, or there has been a backward.
  void set_hook(CommHook hook);

  /// Arms the reducer for the backward that is running. `lowest` is then asked for the lowest rank whose backward it
  /// is: all, unless some have joined the end of their batches. Error, and nothing is changed, when it is armed
  /// already, another that is armed shares a parameter, or `lowest` throws. The first one of all compares the hooks of
  /// the ranks: CommError where they differ.
  void begin(FunctionRef<int()> lowest);
  /// The gradient of a parameter is what it will be. Called by the reducer's own hooks when a gradient has arrived, and
  /// by others for a parameter that will get none: an undefined gradient takes part as zeros. Throws Error when the
  /// parameter is ready already.
  void mark_ready(std::size_t parameter);
  /// The backward is over: marks and launches what is left. A parameter whose gradient is undefined keeps its bucket
  /// from being launched, unless `zeros`. Throws nothing: see wait.
  void launch_rest(bool zeros);
  /// In place of launch_rest when the backward failed, for this `reason`.
  void fail_rest(const std::string& reason);
  /// Waits for all buckets, disarms, and returns what went wrong first, null if nothing did. The averages are
  /// multiplied by `scale`.
  std::exception_ptr wait(double scale = 1);

  std::size_t size() const;
  const Tensor& parameter(std::size_t i) const;
  /// Where in a bucket a parameter's gradient lives.
  const Tensor& view(std::size_t i) const;
  /// Whether a backward has given the parameter a gradient since the last one that was averaged.
  bool touched(std::size_t i) const;

  struct Bucket {
    std::vector<std::string> parameters;
    std::int64_t bytes = 0;
  };
  std::vector<Bucket> plan() const;
  bool rebuilt() const;
  /// Names in the order in which gradients arrived in the last backward.
  std::vector<std::string> arrival_order() const;

  /// Seconds of the last backward.
  struct Times {
    double backward = 0;       // from begin to launch_rest
    double communication = 0;  // while at least one bucket was under way, as far as this rank could see
    double overlap = 0;        // the part of it before launch_rest
    double exposed = 0;        // from launch_rest to the end of wait
  };
  Times times() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem::parallel
