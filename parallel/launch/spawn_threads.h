// spawn_threads: runs a function of this program as several ranks, each a thread of this process.
#pragma once
#include <tandem/tensor/callable.h>

namespace tandem::parallel {

/// How many threads are started.
struct SpawnThreadsOptions {
  int nthreads = 1;
};

/// Calls function(rank, nthreads) on `nthreads` new threads, each of which is a rank of its own of one job:
/// init_process_group({.backend = "thread"}) in it joins that job. Returns when all have ended; then throws what the
/// first rank threw that failed, with "rank <i>: " before it. A rank whose function is left has left its groups too.
/// Kernels of each rank use one thread. manual_seed is the process's, so that the ranks share the seed; each draws from
/// its own stream (RandomStream(rank)).
void spawn_threads(FunctionRef<void(int rank, int nthreads)> function, SpawnThreadsOptions options);

}  // namespace tandem::parallel
