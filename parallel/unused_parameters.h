// What find_unused_parameters does: which parameters a backward will not reach, and whether any rank's did.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <tandem/parallel/reducer.h>

namespace tandem::parallel {

/// Beside a reducer: announces at the beginning of a backward the parameters that will get no gradient, so that their
/// buckets need not wait for the end; and leaves the gradient of a parameter alone that no rank has used.
class UnusedParameters {
 public:
  UnusedParameters(Reducer& reducer, std::shared_ptr<ProcessGroup> group)
      : reducer_(reducer), group_(std::move(group)) {}
  /// Notes which parameters the graph of these outputs reaches. What it returns must live as long as the graph.
  std::shared_ptr<const void> note_graph(std::span<const Tensor> outputs);
  /// After Reducer::begin.
  void begin();
  /// In place of the reducer's launch_rest and wait.
  std::exception_ptr end();
  /// In place of the reducer's fail_rest and wait.
  void abandon(const std::string& reason);

 private:
  using Reached = std::vector<bool>;  // by parameter
  Reducer& reducer_;
  std::shared_ptr<ProcessGroup> group_;
  std::vector<std::weak_ptr<const Reached>> graphs_;  // a backward goes through some of those that still exist
  std::vector<std::pair<std::size_t, Tensor>> kept_;  // older gradients of parameters that this backward does not reach
};

}  // namespace tandem::parallel
