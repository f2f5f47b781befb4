// spawn: runs a function of this program in several processes.
#pragma once
#include <tandem/tensor/callable.h>

namespace tandem::parallel {

/// How many processes are started.
struct SpawnOptions {
  int nprocs = 1;
};

/// Starts this program again `nprocs` times; each new process runs main up to this call, calls function(rank, nprocs),
/// and ends there. Returns when all have ended: 0, or the exit code of the first that failed. What main does before
/// this call is done in every process. The last two parameters tell this call from others and are not to be given.
int spawn(FunctionRef<void(int rank, int nprocs)> function, SpawnOptions options, const char* file = __builtin_FILE(),
          int line = __builtin_LINE());

}  // namespace tandem::parallel
