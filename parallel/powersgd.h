// PowerSGD: gradients sent as products of thin matrices, with what that leaves out added to the next step's (Vogels,
// Karimireddy, Jaggi: "PowerSGD: practical low-rank gradient compression for distributed optimization", 2019).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <tandem/parallel/comm_hook.h>
#include <tandem/tensor/io/state.h>

namespace tandem::parallel {

/// All ranks give the same.
struct PowerSGDOptions {
  std::int64_t matrix_approximation_rank = 1;  // of the product: higher is closer, and sends more
  std::int64_t start_powersgd_iter = 10;       // so many backwards are averaged whole first
  double min_compression_rate = 2;             // a gradient that becomes less than so many times smaller is sent whole
  bool use_error_feedback = true;              // what was left out is added to the next gradient
  bool warm_start = true;                      // each step begins with the last one's result
  std::uint64_t seed = 0;                      // of what the first begins with
};

/// A communication hook that sends a gradient M of shape {rows, cols} (of more dimensions: the first by all others) as
/// P {rows, rank} and Q {cols, rank}, where (rows + cols) * rank * min_compression_rate < rows * cols. What does not
/// qualify is averaged whole. All ranks get the same bits. A gradient in which a rank has a value that is not finite is
/// NaN throughout in that step, and leaves no trace in the next.
///
/// Its state is part of the training: to continue bit for bit it must be saved with the model,
///   powersgd.gather_state();                                        // every rank
///   save_checkpoint(path, {model, optimizer, powersgd});
/// and be loaded before the next backward, by load_checkpoint with the same parts. What each rank has left out is its
/// own; on another number of ranks than saved it, every rank takes the average of what those had.
class PowerSGD final : public Stateful {
 public:
  /// Works in a group, all ranks by default, which must be the model's. Error for an option out of range.
  explicit PowerSGD(const PowerSGDOptions& options = {}, std::shared_ptr<ProcessGroup> group = nullptr);
  /// For one model; Error when it was given out before. It shares the state with this.
  CommHook hook();
  /// Brings what every rank has left out to rank 0, which can then save it, until the next backward. Every rank calls
  /// it.
  void gather_state();

  std::string state_name() const override { return "powersgd"; }
  /// On rank 0, after gather_state or loading; else Error, once there is something that the others have kept.
  NamedTensors state_dict() const override;
  std::vector<std::string> state_problems(const NamedTensors& state) const override;
  void load_state_dict(const NamedTensors& state) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tandem::parallel
