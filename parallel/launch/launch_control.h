// LaunchControl: how a handle follows and ends the job that another thread runs.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <vector>

namespace tandem::parallel {

/// The launcher writes who runs, and looks whether it shall end.
class LaunchControl {
 public:
  void kill() { killed_ = true; }
  bool killed() const { return killed_; }
  /// The processes of ranks, once they are started; none when they could not be, or have ended.
  void set_pids(std::vector<int> pids) {
    const std::lock_guard lock(mutex_);
    pids_ = std::move(pids);
    started_ = true;
    changed_.notify_all();
  }
  void wait_until_started() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return started_; });
  }
  std::vector<int> pids() const {
    const std::lock_guard lock(mutex_);
    return pids_;
  }

 private:
  std::atomic<bool> killed_ = false;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> pids_;
  bool started_ = false;
};

}  // namespace tandem::parallel
