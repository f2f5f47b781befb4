// The process group over shared memory, for processes of one host.
#pragma once
#include <vector>

#include <tandem/parallel/comm/process_group.h>
#include <tandem/parallel/comm/shm_segment.h>

namespace tandem::parallel {

/// A group of ranks on one machine that exchange data through a shared memory segment.
class ShmGroup final : public ProcessGroup {
 public:
  /// `ranks` are the members' ranks in the job, `number` tells this group from the job's others.
  ShmGroup(ShmHeader* segment, int number, std::vector<int> ranks, int world_rank, double timeout_seconds);
  std::string backend() const override { return "shm"; }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }

 protected:
  Work start(const Collective& collective) override;

 private:
  void all_reduce(Tensor& t, ReduceOp op);
  void broadcast(Tensor& t, int root);
  void meet(const char* what);
  void agree(const Collective& collective);
  char* slot(int member) const;

  ShmHeader* segment_;
  ShmBarrier& barrier_;
  std::vector<int> ranks_;
  int rank_ = -1;  // -1: not a member
  double timeout_seconds_;
  std::uint64_t sequence_ = 0;
};

}  // namespace tandem::parallel
