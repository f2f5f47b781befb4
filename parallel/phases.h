// Where the time of a data-parallel step goes.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>

#include <tandem/tensor/device.h>
#include <tandem/tensor/trace.h>

namespace tandem::parallel {

/// Seconds of the last step's phases; 0 for one that was not there. As the calling thread sees them on CPU devices; on
/// CUDA devices as the first one does, between events on its stream.
struct Phases {
  double scatter = 0;    // cutting the inputs and targets
  double replicate = 0;  // bringing the replicas up to date
  double forward = 0;    // the module, on all devices
  double gather = 0;     // joining the outputs
  double loss = 0;       // combining the parts of the loss; computing them counts as forward
  double backward = 0;   // from the first gradient at a replica's output to the last at its parameters
  double reduce = 0;     // adding the replicas' gradients
  /// Bytes that were copied to or from device 0. Memory that devices share is not copied.
  std::int64_t bytes_through_device_0 = 0;
};

/// A point in time on a device: on the CPU a clock's, on a CUDA device an event on its stream.
struct PhaseTime {
  double seconds = 0;
  std::shared_ptr<void> event = nullptr;
};

/// Phases that several threads may write and read.
class PhaseLog {
 public:
  explicit PhaseLog(Device device = {});
  ~PhaseLog();
  /// Forgets the last step.
  void restart();
  /// Never throws, since timers end while exceptions pass: a device that has failed has no times.
  PhaseTime now() const noexcept;
  void add(double Phases::*phase, PhaseTime start, PhaseTime end);
  void add_bytes(std::int64_t bytes);
  /// Waits for a CUDA device to reach the last phase's end.
  Phases read() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Seconds on a clock that never jumps.
double steady_seconds();

/// The phase's name in a trace.
const char* name_of(double Phases::*phase);

/// Adds the time from its construction to its end to a phase, and to the trace.
class PhaseTimer {
 public:
  PhaseTimer(PhaseLog& log, double Phases::*phase)
      : span_(trace::is_on() ? name_of(phase) : nullptr), log_(log), phase_(phase), start_(log.now()) {}
  ~PhaseTimer() { log_.add(phase_, std::move(start_), log_.now()); }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  trace::Span span_;
  PhaseLog& log_;
  double Phases::*phase_;
  PhaseTime start_;
};

}  // namespace tandem::parallel
