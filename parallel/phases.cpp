#include <tandem/parallel/phases.h>

#include <chrono>
#include <mutex>

namespace tandem::parallel {

struct PhaseLog::State {
  mutable std::mutex mutex;
  Phases phases;
};

PhaseLog::PhaseLog() : state_(std::make_unique<State>()) {}
PhaseLog::~PhaseLog() = default;

void PhaseLog::restart() {
  const std::lock_guard lock(state_->mutex);
  state_->phases = {};
}

void PhaseLog::add(double Phases::*phase, double seconds) {
  const std::lock_guard lock(state_->mutex);
  state_->phases.*phase += seconds;
}

void PhaseLog::add_bytes(std::int64_t bytes) {
  const std::lock_guard lock(state_->mutex);
  state_->phases.bytes_through_device_0 += bytes;
}

Phases PhaseLog::read() const {
  const std::lock_guard lock(state_->mutex);
  return state_->phases;
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace tandem::parallel
