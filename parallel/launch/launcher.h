// The launcher: starts a program once for each rank, watches the processes, and ends or restarts them when one fails.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace tandem::parallel {

class LaunchControl;

/// How many ranks are started and where, what they are given, and what happens to their output.
struct LaunchOptions {
  int nprocs = 1;                    // on this host
  int nnodes = 1;                    // hosts; on each a launcher runs
  int node_rank = 0;                 // of this one
  std::string master_addr = {};      // of node 0; empty: 127.0.0.1, for one node
  int master_port = 0;               // 0: one that the system gives, for one node
  int max_restarts = 0;              // how often all ranks are started again when one has failed
  double timeout_seconds = 0;        // how long a silent rank or node is waited for; 0: TANDEM_TIMEOUT, or 30
  bool prefix_output = true;         // each line of a rank's output begins with "[rank] "
  std::string log_dir = {};          // a folder for a file with the output of each rank
  bool tee = false;                  // with log_dir: the output comes to the terminal as well
  bool announce = false;             // says on standard error how the cores are divided
  bool forward_signals = false;      // signals go to the ranks; with SIGTERM, SIGINT, SIGHUP or SIGQUIT the job ends
  std::string must_begin = {};       // unless empty, a rank that ends without a call of rank_begins has failed:
                                     // the text says what it did not come to
  LaunchControl* control = nullptr;  // for another thread that follows the job
  std::vector<std::pair<std::string, std::string>> environment = {};  // more variables for the ranks
};

/// Runs `command` as nprocs processes and waits for them. They find their place in the variables that torchrun sets,
/// and MASTER_ADDR:MASTER_PORT is a store that the launcher of node 0 holds. Unless OMP_NUM_THREADS is set, each gets
/// cores / nprocs threads. When a rank fails it is named on standard error, the others learn of it at once, and get 3 s
/// to end, then SIGTERM, and 3 s later SIGKILL. What a rank leaves in its process group ends with it, and all of it
/// with the launcher, whatever the launcher's end. Returns 0, or the exit code of the rank that failed first (128 +
/// signal when it was killed); 128 + signal when a signal has ended the job; 1 when none failed but output could not be
/// written, which ends no rank. Error for options that cannot be used, CommError when other nodes do not come.
int launch(const std::vector<std::string>& command, const LaunchOptions& options);

/// What launch would start: for each rank on this node a line with its variables and its command.
std::string describe_launch(const std::vector<std::string>& command, const LaunchOptions& options);

/// For a rank of a launcher with must_begin.
void rank_begins();

}  // namespace tandem::parallel
