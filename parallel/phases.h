// Where the time of a data-parallel step goes.
#pragma once
#include <cstdint>
#include <memory>

#include <tandem/tensor/trace.h>

namespace tandem::parallel {

/// Seconds of the last step's phases, as the calling thread sees them; 0 for one that was not there.
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

/// Phases that several threads may write and read.
class PhaseLog {
 public:
  PhaseLog();
  ~PhaseLog();
  /// Forgets the last step.
  void restart();
  void add(double Phases::*phase, double seconds);
  void add_bytes(std::int64_t bytes);
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
      : span_(trace::is_on() ? name_of(phase) : nullptr), log_(log), phase_(phase), start_(steady_seconds()) {}
  ~PhaseTimer() { log_.add(phase_, steady_seconds() - start_); }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  trace::Span span_;
  PhaseLog& log_;
  double Phases::*phase_;
  double start_;
};

}  // namespace tandem::parallel
