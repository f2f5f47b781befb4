// Whether operations are recorded for backward: a setting of each thread, carried into the threads that parallel_for
// and run_on_devices use.
#pragma once

namespace tandem {

/// Whether the calling thread records.
bool grad_enabled();

/// Switches recording on or off for the calling thread until it is destroyed.
class GradModeGuard {
 public:
  explicit GradModeGuard(bool enabled);
  ~GradModeGuard();
  GradModeGuard(const GradModeGuard&) = delete;
  GradModeGuard& operator=(const GradModeGuard&) = delete;

 private:
  bool previous_;
};

/// Nothing is recorded while it lives: for evaluation and for updates by hand.
class NoGradGuard : GradModeGuard {
 public:
  NoGradGuard() : GradModeGuard(false) {}
};

}  // namespace tandem
