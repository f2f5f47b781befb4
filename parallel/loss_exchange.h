// What ranks tell each other about a loss that is taken of the rows of all: its normaliser, and which loss it is.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <tandem/nn/loss.h>
#include <tandem/parallel/comm/process_group.h>

namespace tandem::parallel {

/// What is compared of a loss that is a function.
std::string function_with(Reduction reduction);

/// The sum of the ranks' normalisers, under way while the forward computes. Where the model is on a GPU it is summed
/// there, so that the host need not wait for it.
class LossExchange {
 public:
  /// Starts it. `own` is this rank's normaliser, `home` the GPU or the CPU, and `criterion` is compared among the ranks
  /// but those that have `ended`.
  LossExchange(std::shared_ptr<ProcessGroup> group, const Tensor& own, Device home, std::string criterion,
               std::vector<int> ended);
  /// The sum, in float64 on `home`. CommError on every rank where criteria differ.
  Tensor wait();

 private:
  std::shared_ptr<ProcessGroup> group_;
  std::string criterion_;
  std::vector<int> ended_;
  Tensor all_;  // of each rank the normaliser's bits, 0 for one on a GPU, and a hash of the criterion
  Work told_;
  Tensor on_gpu_;
  Work summed_;
};

}  // namespace tandem::parallel
