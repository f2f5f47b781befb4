// spawn: runs a function of this program in several processes.
#pragma once
#include <memory>
#include <vector>

#include <tandem/tensor/callable.h>

namespace tandem::parallel {

/// How many processes are started, and whether `spawn` waits for them.
struct SpawnOptions {
  int nprocs = 1;
  bool join = true;
};

/// The processes that a call of spawn has started. They end with this object. One that was moved from throws Error.
class SpawnHandle {
 public:
  SpawnHandle(SpawnHandle&& other) noexcept;
  SpawnHandle& operator=(SpawnHandle&& other) noexcept;
  ~SpawnHandle();
  /// Waits until all have ended. Returns 0, or the exit code of the first that failed (128 + signal when it was
  /// killed).
  int wait();
  /// Waits so long at most; false when some still run then.
  bool wait(double seconds);
  bool running() const;
  /// The processes, by rank; those of ranks that have ended may be gone.
  std::vector<int> pids() const;
  /// Ends all of them, and what they have started. `wait` returns 137 then.
  void kill();
  /// As wait(), so that a main may `return spawn(...)`.
  operator int() { return wait(); }

 private:
  friend SpawnHandle spawn(FunctionRef<void(int, int)>, SpawnOptions, const char*, int);
  struct State;
  State& state() const;
  explicit SpawnHandle(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// Starts this program again `nprocs` times; each new process runs main up to this call, calls function(rank, nprocs),
/// and ends there. What main does before this call is done in every process; one whose main ends without coming to it
/// has failed. (In the processes of a later call, this one returns at once, as if all had ended well.) With `join` the
/// call returns when all have ended; meanwhile signals that would end this program are passed on to them. Without it,
/// keep the handle: a statement that drops it ends the ranks at once. All calls come from one thread. Error when they
/// do not, or the processes cannot be started. The last two parameters tell this call from others and are not to be
/// given.
SpawnHandle spawn(FunctionRef<void(int rank, int nprocs)> function, SpawnOptions options,
                  const char* file = __builtin_FILE(), int line = __builtin_LINE());

}  // namespace tandem::parallel
