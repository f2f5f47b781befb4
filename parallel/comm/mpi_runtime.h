// MPI in this process, from the first group to the end of the program.
#pragma once
#include <mpi.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include <tandem/parallel/comm/backends.h>

namespace tandem::parallel {

// Note [Given up]
// A transfer that is given up leaves requests behind. MPI can cancel a receive that no message has met yet, but not one
// whose data are on their way, and the memory belongs to a caller who is about to free it. MPI moves data within its
// own calls alone (but for network cards, which have done their part long before a deadline). So every call is made
// under one mutex, and once any exchange of this process has been given up, none is made any more: neither by other
// groups, which fail with it, nor MPI_Finalize. A program that ends without it is one that has failed for mpirun, too,
// which then ends the job. Until then, other ranks may see nonsense in the data that they receive from this one, but
// these belong to the exchange that was given up, and fail as well.
class MpiRuntime {
 public:
  /// The process's, which is never destroyed.
  static MpiRuntime& get();
  /// Initialises MPI, at the first call, on a thread that also finalises it when the program ends. Waits until all
  /// ranks have come; CommError after the timeout, Error when MPI is not what is needed.
  void start(const GroupSetup& setup, int rank);

  // All of these under the mutex.
  std::mutex mutex;
  MPI_Comm comm = MPI_COMM_NULL;  // of all ranks, for messages of groups alone
  int largest_tag = 0;
  int meshes = 0;
  bool over = false;  // no call may be made any more
  // What the exchange that was given up waited for.
  std::vector<int> lost_ranks;  // in the job
  bool late = false;

 private:
  enum class Phase { none, starting, running, ending, ended };
  void run();
  void leave(int status);

  std::condition_variable changed_;
  Phase phase_ = Phase::none;
  std::string error_;
  int rank_ = -1, size_ = 0;
  const pid_t process_ = getpid();
};

/// MPI's words for an error.
std::string mpi_text(int code);

}  // namespace tandem::parallel
