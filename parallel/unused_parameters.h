// What find_unused_parameters does: which parameters a backward will not reach, and whether any rank's did.
#pragma once
#include <memory>
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
  /// After Reducer::begin, within the backward.
  void begin();
  /// In place of the reducer's launch_rest and wait.
  std::exception_ptr end(double scale = 1);
  /// In place of begin, on a rank that has no batch. `keeps`: gradients may stay that were averaged before.
  void begin_without_batch(bool keeps);
  /// In place of the reducer's fail_rest and wait.
  void abandon(const std::string& reason);

 private:
  // Keeps the gradient of a parameter that this rank has not used since it was averaged.
  void keep(std::size_t parameter);
  Reducer& reducer_;
  std::shared_ptr<ProcessGroup> group_;
  std::vector<Tensor> kept_;  // by parameter
};

}  // namespace tandem::parallel
