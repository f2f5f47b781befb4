#include <tandem/parallel/phases.h>

#include <chrono>
#include <mutex>
#include <utility>

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

const char* name_of(double Phases::*phase) {
  constexpr std::pair<double Phases::*, const char*> kNames[] = {
      {&Phases::scatter, "scatter"}, {&Phases::replicate, "replicate"}, {&Phases::forward, "forward"},
      {&Phases::gather, "gather"},   {&Phases::loss, "loss"},           {&Phases::backward, "backward"},
      {&Phases::reduce, "reduce"}};
  for (const auto& [known, name] : kNames)
    if (known == phase) return name;
  return "phase";
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace tandem::parallel
