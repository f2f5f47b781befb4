// Progress: how far a training run has come, so that it can be saved and taken up again with the model.
#pragma once
#include <cstdint>
#include <map>
#include <string>

#include <tandem/tensor/io/state.h>

namespace tandem {

/// Counters and a few numbers with names of your choice; saved as tensors of one element, int64 and float64.
class Progress : public Stateful {
 public:
  std::int64_t epoch = 0;                 // epochs that are complete
  std::int64_t batch = 0;                 // batches done in the epoch that is not
  std::int64_t step = 0;                  // optimizer steps since the beginning
  std::map<std::string, double> numbers;  // the loss summed so far, the best accuracy, ...

  std::string state_name() const override { return "progress"; }
  /// "epoch", "batch", "step", "numbers.<name>"; copies, unlike a module's.
  NamedTensors state_dict() const override;
  std::vector<std::string> state_problems(const NamedTensors& state) const override;
  /// Replaces all numbers.
  void load_state_dict(const NamedTensors& state) override;
};

}  // namespace tandem
