// Process groups: the ranks that work together, and the collective operations between them.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <tandem/parallel/comm/collective.h>
#include <tandem/parallel/comm/store.h>
#include <tandem/parallel/comm/work.h>
#include <tandem/tensor/tensor.h>

namespace tandem::parallel {

class Joins;

/// What a lost peer, a timeout or a disagreement between ranks throws; carries the rank it is about, by its number in
/// the group, or -1.
class CommError : public Error {
 public:
  CommError(int rank, const std::string& message) : Error(message), rank_(rank) {}
  int rank() const { return rank_; }

 private:
  int rank_;
};

/// A group of ranks. Every rank of the group calls the same collectives in the same order, from one thread at a time.
/// Each call starts one and returns its Work; the functions below this class wait for it. Arguments are checked before
/// anything is sent: Error for a root out of range, a wrong number of elements, a type that cannot be combined, a
/// tensor on a device that the backend does not serve, memory that does not serve (below), or a call by a process that
/// is no member. Ranks that disagree get a CommError on each of them; a call after a loss returns a Work that throws.
///
/// The output is not an expanded view, and shares no memory with the input: what lies between the first and the last
/// element of the one is apart from that of the other. But a rank's own part may be in place: the input of all_gather
/// and gather may be exactly part rank() of the output, and the output of scatter and reduce_scatter exactly part
/// rank() of the input, where both are dense. Calls have their effects one after the other, also where several are
/// under way on one tensor. Views that are not dense are copied. Sums follow one fixed balanced binary tree over the
/// ranks: the same bits on every rank, in every run, and on every backend of the CPU.
class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;
  virtual std::string backend() const = 0;
  /// This process's rank in the group, 0 .. size() - 1; -1 when it is not a member.
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// How many collectives this rank has started in the group; messages are not counted.
  std::uint64_t call_count() const { return call_count_; }

  /// Replaces `t` by the combination of all ranks' tensors, which have one shape and dtype.
  Work all_reduce(Tensor& t, ReduceOp op = ReduceOp::sum);
  /// Copies `t` of rank `root` into every rank's.
  Work broadcast(Tensor& t, int root);
  /// Replaces `t` of rank `root` by the combination of all ranks' tensors; the others' stay as they are.
  Work reduce(Tensor& t, int root, ReduceOp op = ReduceOp::sum);
  /// `output` gets every rank's `input`, rank 0's first: it has size() times as many elements, such as
  /// {size, ...shape} or {size * rows, ...}.
  Work all_gather(Tensor& output, const Tensor& input);
  /// The same on rank `root` alone; elsewhere `output` may be undefined, and is not touched.
  Work gather(Tensor& output, const Tensor& input, int root);
  /// Each rank's `output` gets its part of `input` of rank `root`, which has size() times as many elements; elsewhere
  /// `input` may be undefined.
  Work scatter(Tensor& output, const Tensor& input, int root);
  /// `output` gets this rank's part of the combination of all ranks' `input`, which has size() times as many elements.
  Work reduce_scatter(Tensor& output, const Tensor& input, ReduceOp op = ReduceOp::sum);
  /// Part r of `input` goes to rank r, whose `output` has this rank's part at the place of this rank: both have size()
  /// parts of equal size, and one shape.
  Work all_to_all(Tensor& output, const Tensor& input);
  /// Sends `t` to rank `to`, which calls recv. Messages from one rank to another arrive in the order of their sends,
  /// and are independent of collectives and of other messages. Waiting for the send may last until the other has
  /// received it; of two ranks that send to each other first, one must not wait before it receives.
  Work send(const Tensor& t, int to);
  /// Replaces `t` by what rank `from` sends, which has its shape and dtype; else a CommError on both, and the message
  /// is lost.
  Work recv(Tensor& t, int from);
  /// Done when every rank has called it.
  Work barrier();
  /// Takes this rank's place in the next collective, which ends on every other rank with a CommError that carries
  /// `message`, or its first 1023 bytes: for a rank that cannot take part. Ends without an error here.
  Work fail(const std::string& message);
  /// For a rank that cannot know what the others call next: from now on each collective that it calls is a `fail` of
  /// this `message`, and throws that as an Error here. Starts nothing by itself; a second one changes nothing.
  void give_up(const std::string& message);

  /// Memory for collectives, filled with zeros, that the backend may place where all ranks reach it. On such tensors,
  /// and on dense parts of them, an all_reduce copies nothing. Every rank calls it, in the same order, with the same
  /// arguments. The memory goes back when the tensors in it are gone on every rank, at the next allocate, and with the
  /// group at the latest. Throws Error when memory is short.
  virtual Tensor allocate(const Shape& shape, DType dtype, Device device = {});
  /// Whether collectives work on tensors of the device.
  virtual bool serves(Device device) const { return device.is_cpu(); }

 protected:
  /// Starts a collective whose arguments are checked.
  virtual Work start(const Collective& collective) = 0;
  /// The same in a group that another one is made of.
  static Work start_in(ProcessGroup& group, const Collective& collective) { return group.start(collective); }

 private:
  friend Joins;
  Work run(Collective collective);
  Work send_off(const Collective& collective);
  std::uint64_t call_count_ = 0;
  std::string given_up_;          // why; empty: it has not
  std::shared_ptr<Joins> joins_;  // what this rank knows of the group's joins, once there was need to
};

/// How a process joins its job. What is left out comes from the environment that tandem-run, spawn or torchrun set.
struct InitOptions {
  std::string backend = {};                // "shm", "gloo", "mpi", "thread", "nccl"; empty: nccl where there are CUDA
                                           // devices, else shm where all ranks share a host, else gloo
  std::string init_method = "env://";      // where the ranks meet: "env://" is MASTER_ADDR and MASTER_PORT; or
                                           // "tcp://host:port", which rank 0 holds, or "file:///path"
  int rank = -1;                           // from RANK when left out
  int world_size = -1;                     // from WORLD_SIZE when left out
  std::shared_ptr<Store> store = nullptr;  // instead of init_method
  double timeout_seconds = 0;              // how long a collective, or joining, waits for a rank that does not come; on
                                           // shm and thread, also for one that has started it and then computes
                                           // without a call of wait or is_completed: see Work; 0: TANDEM_TIMEOUT, or 30
};
/// Joins the job: waits for all ranks and makes the default group, to which they all belong. Error says which setting
/// is missing or wrong; CommError names a rank that does not come or was told something else. A rank that has failed to
/// join cannot try again in that job, which is an Error.
void init_process_group(const InitOptions& options = {});
/// Leaves the job, when what was started has ended. Another init_process_group may follow. A process that ends without
/// it leaves at once: what was started and not waited for then fails on the others.
void destroy_process_group();
bool is_initialized();
/// Whether this process was started as one of several ranks, by tandem-run, mpirun or srun, or has RANK set: then a
/// program need not call spawn.
bool is_launched();
/// The default group; Error before init_process_group.
std::shared_ptr<ProcessGroup> default_group();
/// `group`, or the default group where it is null.
std::shared_ptr<ProcessGroup> or_default(std::shared_ptr<ProcessGroup> group);
/// A group of some of the job's ranks. Every rank of the job calls it, in the same order; those that are not members
/// get a group without them, whose operations are errors.
std::shared_ptr<ProcessGroup> new_group(const std::vector<int>& ranks);

/// Options of a collective. With `async_op` it returns at once, and the caller waits on the Work.
struct CollectiveOptions {
  ReduceOp op = ReduceOp::sum;
  std::shared_ptr<ProcessGroup> group = nullptr;  // default: all ranks
  bool async_op = false;
};
// The collectives of ProcessGroup, in the group of the options. They return when the result is there, unless async_op.

Work all_reduce(Tensor& t, const CollectiveOptions& options = {});
Work broadcast(Tensor& t, int root, const CollectiveOptions& options = {});
Work reduce(Tensor& t, int root, const CollectiveOptions& options = {});
Work all_gather(Tensor& output, const Tensor& input, const CollectiveOptions& options = {});
Work gather(Tensor& output, const Tensor& input, int root, const CollectiveOptions& options = {});
Work scatter(Tensor& output, const Tensor& input, int root, const CollectiveOptions& options = {});
Work reduce_scatter(Tensor& output, const Tensor& input, const CollectiveOptions& options = {});
Work all_to_all(Tensor& output, const Tensor& input, const CollectiveOptions& options = {});
Work send(const Tensor& t, int to, const CollectiveOptions& options = {});
Work recv(Tensor& t, int from, const CollectiveOptions& options = {});
Work barrier(const CollectiveOptions& options = {});

/// This process's rank and the number of ranks in the default group; 0 and 1 in a program that is no rank of a job.
/// Error in a rank that has not called init_process_group.
int rank();
int world_size();
/// The device of this rank: cuda:LOCAL_RANK where there are GPUs, else the CPU. Of ranks that are threads, the number
/// of the rank; where there are fewer GPUs, ranks share them.
Device local_device();

}  // namespace tandem::parallel
