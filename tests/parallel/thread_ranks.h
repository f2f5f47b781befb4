// Groups of ranks that are threads of a test.
#pragma once
#include <memory>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/comm/process_group.h>
#include <tandem/parallel/launch/spawn_threads.h>

namespace tandem::test {

/// Runs body(group) on `n` ranks with their default group.
template <class Body>
void on_ranks(int n, const Body& body) {
  parallel::spawn_threads(
      [&](int, int) {
        parallel::init_process_group({.backend = "thread"});
        body(*parallel::default_group());
        parallel::destroy_process_group();
      },
      {.nthreads = n});
}

// How long a rank waits for one that is silent on purpose, and so the longest that all others may be held up by the
// machine.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kImpatientSeconds = 4;
#else
inline constexpr int kImpatientSeconds = 1;
#endif

/// A group of all ranks with a timeout of its own, over the memory that threads or that processes share. Called by each
/// rank when all have joined: joining a loaded machine may take long.
inline std::shared_ptr<parallel::ProcessGroup> impatient_group(bool processes, const char* name = "impatient",
                                                               double timeout_seconds = kImpatientSeconds) {
  parallel::GroupSetup setup{.store = parallel::t_thread_rank->store,
                             .name = name,
                             .world_rank = parallel::t_thread_rank->rank,
                             .timeout_seconds = timeout_seconds};
  for (int r = 0; r < parallel::t_thread_rank->world_size; ++r) setup.ranks.push_back(r);
  return processes ? parallel::make_shm_group(setup) : parallel::make_thread_group(setup);
}

}  // namespace tandem::test
