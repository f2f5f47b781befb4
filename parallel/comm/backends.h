// The backends: how each makes a group.
#pragma once
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <tandem/parallel/comm/process_group.h>
#include <tandem/parallel/comm/store.h>

namespace tandem::parallel {

/// What a backend needs to make a group. All ranks of the job make it, in the same order, members or not.
struct GroupSetup {
  std::shared_ptr<Store> store = {};  // of the job; a launcher writes how rank r ended to the key "ended/r"
  std::string name = {};              // of the group, the same on all ranks and unique in the job: prefix of its keys
  std::vector<int> ranks = {};        // of the members in the job, increasing
  std::vector<int> hosts = {};        // of each member, the lowest rank of the job that shares its host
  int world_rank = 0;                 // of this process in the job
  std::string store_host = {};        // where the store is; empty where it has no host
  double timeout_seconds = 30;
  /// The rank of this process in the group; -1 when it is no member.
  int place() const {
    const auto found = std::find(ranks.begin(), ranks.end(), world_rank);
    return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
  }
  /// How errors call a member: "rank 1", or "rank 1 (rank 3 of the job)" where the numbers differ.
  std::string rank_name(int member) const;
};

/// Ranks that are processes of one host; Error, naming two of them, when they are not.
std::shared_ptr<ProcessGroup> make_shm_group(const GroupSetup& setup);
/// Ranks that are threads of this process.
std::shared_ptr<ProcessGroup> make_thread_group(const GroupSetup& setup);
/// Ranks anywhere, over Gloo's TCP transport. In builds without Gloo an Error that says so.
std::shared_ptr<ProcessGroup> make_gloo_group(const GroupSetup& setup);
/// Ranks that mpirun has started, over MPI, by the module libtandem_mpi.so.
std::shared_ptr<ProcessGroup> make_mpi_group(const GroupSetup& setup);
/// Error unless the module is there and MPI has started this process.
void check_mpi();

/// Ranks with a CUDA device each, whose tensors go over NCCL, by the module libtandem_nccl.so; tensors of the CPU go as
/// in a group over threads, memory that processes share, or Gloo.
std::shared_ptr<ProcessGroup> make_nccl_group(const GroupSetup& setup);

/// Whether the process is ending, and destroys what is static.
bool process_ends();
/// Whether a group that ends now does not wait for what was started in it: an exception passes, or the process ends.
bool ends_at_once();

/// What spawn_threads tells the thread of a rank: its place, and the job's store.
struct ThreadRank {
  int rank = 0, world_size = 1;
  std::shared_ptr<Store> store = {};
};
/// The calling thread's; null in a thread that is no rank of its own.
inline thread_local constinit const ThreadRank* t_thread_rank = nullptr;

}  // namespace tandem::parallel
