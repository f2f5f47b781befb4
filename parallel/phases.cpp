#include <tandem/parallel/phases.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include <tandem/tensor/cuda/module.h>

namespace tandem::parallel {

struct PhaseLog::State {
  struct Interval {
    double Phases::*phase;
    PhaseTime start, end;
  };
  Device device;
  std::mutex mutex;
  Phases phases;
  std::vector<Interval> on_device;  // that have not been read yet
};

PhaseLog::PhaseLog(Device device) : state_(std::make_unique<State>()) { state_->device = device; }
PhaseLog::~PhaseLog() = default;

void PhaseLog::restart() {
  const std::lock_guard lock(state_->mutex);
  state_->phases = {};
  state_->on_device.clear();
}

PhaseTime PhaseLog::now() const noexcept {
  if (state_->device.is_cpu()) return {.seconds = steady_seconds()};
  try {
    const cuda::Module& module = cuda::module("DataParallel");
    return {.event = std::shared_ptr<void>(module.record_time(state_->device.index()), module.release_time)};
  } catch (const std::exception&) {
    return {};
  }
}

void PhaseLog::add(double Phases::*phase, PhaseTime start, PhaseTime end) {
  const std::lock_guard lock(state_->mutex);
  if (start.event && end.event)
    state_->on_device.push_back({phase, std::move(start), std::move(end)});
  else
    state_->phases.*phase += end.seconds - start.seconds;
}

void PhaseLog::add_bytes(std::int64_t bytes) {
  const std::lock_guard lock(state_->mutex);
  state_->phases.bytes_through_device_0 += bytes;
}

Phases PhaseLog::read() const {
  const std::lock_guard lock(state_->mutex);
  for (const State::Interval& interval : state_->on_device)
    state_->phases.*interval.phase +=
        cuda::module("DataParallel").seconds_between(interval.start.event.get(), interval.end.event.get());
  state_->on_device.clear();
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
