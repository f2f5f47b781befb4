// The launcher: starts a program once for each rank on this host, watches it, and ends the rest when one fails.
#pragma once
#include <string>
#include <vector>

namespace tandem::parallel {

/// How many ranks are started, and what they are given.
struct LaunchOptions {
  int nprocs = 1;
  bool prefix_output = true;  // each line of a rank's output begins with "[rank] "
  bool announce = false;      // says on standard error how the cores are divided
  std::vector<std::pair<std::string, std::string>> environment = {};  // more variables for the ranks
};

/// Runs `command` as nprocs processes and waits for them. Each gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
/// MASTER_ADDR and MASTER_PORT of a store that the launcher holds, and, unless it is set already, OMP_NUM_THREADS =
/// cores / nprocs. When a rank fails, it is named on standard error with its exit code or signal, the others learn of
/// it at once, and get 3 s to end before they are ended. Returns 0, or the exit code of the rank that failed first (128
/// + signal when it was killed); 1 when none failed but output could not be written, which ends no rank.
int launch(const std::vector<std::string>& command, const LaunchOptions& options);

}  // namespace tandem::parallel
