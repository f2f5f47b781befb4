// What the library keeps for each thread, in one place, so that whoever runs work on another thread can carry it there.
#pragma once

namespace tandem {

/// Settings of the calling thread. `parallel_for` and `run_on_devices` carry them into the threads they use.
struct ThreadContext {
  bool record_gradients = true;         // see GradModeGuard
  const void* replica_owner = nullptr;  // see ReplicaScope
  int replica = 0;
  int random_stream = 0;       // see RandomStream
  bool single_thread = false;  // see SingleThreadScope
  int traced_rank = -1;        // see trace::RankScope
};
inline thread_local constinit ThreadContext t_thread_context;

/// Gives the calling thread another context until it is destroyed.
class ThreadContextScope {
 public:
  explicit ThreadContextScope(const ThreadContext& context) : previous_(t_thread_context) {
    t_thread_context = context;
  }
  ~ThreadContextScope() { t_thread_context = previous_; }
  ThreadContextScope(const ThreadContextScope&) = delete;
  ThreadContextScope& operator=(const ThreadContextScope&) = delete;

 private:
  ThreadContext previous_;
};

}  // namespace tandem
