// A state that was taken, to be saved or compared.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include <tandem/tensor/error.h>
#include <tandem/tensor/io/state.h>

namespace tandem::parallel {

/// Named tensors in the place of the object whose state they are; nothing is loaded into it.
class Snapshot final : public Stateful {
 public:
  Snapshot(std::string name, NamedTensors state) : name_(std::move(name)), state_(std::move(state)) {}
  std::string state_name() const override { return name_; }
  NamedTensors state_dict() const override { return state_; }
  std::vector<std::string> state_problems(const NamedTensors&) const override { return {"it can only be read"}; }
  void load_state_dict(const NamedTensors&) override { fail(name_, "this is a snapshot, which can only be read"); }

 private:
  std::string name_;
  NamedTensors state_;
};

}  // namespace tandem::parallel
