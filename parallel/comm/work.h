// Work: a collective that has been started.
#pragma once
#include <exception>
#include <memory>
#include <utility>

namespace tandem::parallel {

/// A collective that this rank has started. Copies stand for the same one. Its tensors are kept alive until it is done,
/// and must not be read or written by others before. Dropping every copy does not cancel it: the group still finishes
/// it, at the latest in its next blocking call or when it is destroyed. On the backends shm and thread a rank does its
/// share of a collective within calls alone: when it starts one, waits for one, or asks for one. A rank that computes
/// between start and wait for longer than the timeout is late for the others.
class Work {
 public:
  /// What a backend implements. It remembers the first error, and throws it again in every later call of wait.
  class State {
   public:
    virtual ~State() = default;
    /// Does what can be done without waiting; true when the collective has ended, well or not.
    virtual bool poll() = 0;
    /// Returns when the collective has ended; throws what went wrong.
    virtual void wait() = 0;
    /// See Work::failed_alone.
    virtual bool failed_alone() const { return false; }
  };

  /// A collective that is done.
  Work() = default;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
  /// One that ends with `told`, and throws `error`, whatever that throws.
  static Work failing(Work told, const std::exception_ptr& error);
  /// Returns when the result is there. Throws CommError when a rank was lost or came too late, or when the ranks
  /// disagree; every call of wait throws it.
  void wait() const {
    if (state_) state_->wait();
  }
  /// The same for at most so many seconds: true when it has ended, false when the time is over. It then goes on, and
  /// can be waited for again.
  bool wait(double seconds) const;
  /// Whether wait would return or throw at once; helps the collective along.
  bool is_completed() const { return !state_ || state_->poll(); }
  /// What wait would throw; null while the collective is under way or when it went well.
  std::exception_ptr exception() const;
  /// Whether wait has thrown what went wrong on this rank alone, in what follows a collective: the others go on.
  bool failed_alone() const { return state_ && state_->failed_alone(); }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace tandem::parallel
