// What can be saved: named tensors, and the interface of everything that consists of them.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include <tandem/tensor/tensor.h>

namespace tandem {

/// Names and tensors in a fixed order. Numbers are stored as tensors of one element.
using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

/// Something whose state is named tensors: a module, an optimizer, a schedule, progress through the data.
class Stateful {
 public:
  virtual ~Stateful() = default;
  /// "model", "optimizer", ...: the prefix of its entries in a file that holds several.
  virtual std::string state_name() const = 0;
  /// The state as it is now; the tensors share memory with it.
  virtual NamedTensors state_dict() const = 0;
  /// What keeps `state` from being loaded, one sentence a fault; empty when it fits. Changes nothing.
  virtual std::vector<std::string> state_problems(const NamedTensors& state) const = 0;
  /// Takes over `state`: values are copied to where the current ones live. Throws Error listing all problems, and then
  /// nothing has changed.
  virtual void load_state_dict(const NamedTensors& state) = 0;
};

/// How `given` differs from `own`, one sentence a fault: entries that are missing, unknown, or of another shape, each
/// with its name and the shapes of both. Types may differ, as values are converted; what state_problems needs.
std::vector<std::string> state_mismatches(const NamedTensors& own, const NamedTensors& given);

}  // namespace tandem
