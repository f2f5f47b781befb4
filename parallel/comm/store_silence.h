// Stores that do not answer: how long a call waits for them, and what it throws then. All of it is inline, since the
// module of the backend mpi takes nothing from the library.
#pragma once
#include <algorithm>
#include <chrono>

#include <tandem/parallel/comm/clock.h>
#include <tandem/parallel/comm/process_group.h>

namespace tandem::parallel {

/// The store is there, but who holds it, or has locked it, is stopped or overloaded. About the holder, where it is
/// known.
class SilentStore : public CommError {
 public:
  using CommError::CommError;
};

/// While one is there, what this thread asks of any store ends when so many seconds have passed since it was made: for
/// questions that are of use only for a while.
class AnswerLimit {
 public:
  explicit AnswerLimit(double seconds) : before_(t_end) {
    t_end = std::min(t_end, Clock::now() + clock_ticks(seconds));
  }
  ~AnswerLimit() { t_end = before_; }
  AnswerLimit(const AnswerLimit&) = delete;
  AnswerLimit& operator=(const AnswerLimit&) = delete;
  /// How many of these seconds a call that begins now may take.
  static double within(double seconds) {
    constexpr double kLeast = 0.001;
    if (t_end == Clock::time_point::max()) return seconds;
    return std::clamp(Seconds(t_end - Clock::now()).count(), kLeast, std::max(seconds, kLeast));
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;
  static inline thread_local constinit Clock::time_point t_end = Clock::time_point::max();
  const Clock::time_point before_;
};

}  // namespace tandem::parallel
