// Process groups: the ranks that work together, and the collective operations between them.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <tandem/tensor/tensor.h>

namespace tandem::parallel {

/// What a lost peer, a timeout or a disagreement between ranks throws; carries the rank it is about, or -1.
class CommError : public Error {
 public:
  CommError(int rank, const std::string& message) : Error(message), rank_(rank) {}
  int rank() const { return rank_; }

 private:
  int rank_;
};

/// How the values of the ranks are combined.
enum class ReduceOp { sum, product, min, max, avg };

/// A group of ranks. Every rank of the group calls the same operations in the same order; each call returns when its
/// result is there. Sums follow one fixed binary tree over the ranks: the same bits on every rank and in every run.
class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;
  virtual std::string backend() const = 0;
  /// This process's rank in the group, 0 .. size() - 1.
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Replaces `t` by the combination of all ranks' tensors, which have one shape and dtype.
  virtual void all_reduce(Tensor& t, ReduceOp op) = 0;
  /// Copies `t` of rank `root` into every rank's.
  virtual void broadcast(Tensor& t, int root) = 0;
  /// Returns when every rank has called it.
  virtual void barrier() = 0;
};

/// How a process joins its job. What is left out comes from the environment that tandem-run, spawn or torchrun set.
struct InitOptions {
  std::string backend = {};  // "shm"; empty: the best for the device at hand
  int rank = -1;
  int world_size = -1;
  double timeout_seconds = 30;  // how long a collective waits for a rank that does not come
};
/// Joins the job: makes the default group, to which all ranks belong.
void init_process_group(const InitOptions& options = {});
/// Leaves the job. Another init_process_group may follow.
void destroy_process_group();
bool is_initialized();
/// The default group; Error before init_process_group.
std::shared_ptr<ProcessGroup> default_group();
/// A group of some of the job's ranks. Every rank of the job calls it, in the same order; those that are not members
/// get a group without them, whose operations are errors.
std::shared_ptr<ProcessGroup> new_group(const std::vector<int>& ranks);

/// Options of a collective: how values are combined, and in which group (default: all ranks).
struct CollectiveOptions {
  ReduceOp op = ReduceOp::sum;
  std::shared_ptr<ProcessGroup> group = nullptr;
};
void all_reduce(Tensor& t, const CollectiveOptions& options = {});
void broadcast(Tensor& t, int root, const CollectiveOptions& options = {});
void barrier(const CollectiveOptions& options = {});

/// This process's rank and the number of ranks in the default group; 0 and 1 in a program that is no rank of a job.
/// Error in a rank that has not called init_process_group.
int rank();
int world_size();
/// The device of this process: cuda:LOCAL_RANK where there are GPUs, else the CPU.
Device local_device();

}  // namespace tandem::parallel
