// ReplicaReducer: where the gradients of the replicas of a model lie, and how they become one.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <tandem/autograd/node.h>
#include <tandem/parallel/rank_sums.h>

namespace tandem::parallel {

/// How replicas are summed whose sums must not depend on how many devices or ranks there are.
struct FixedSums {
  bool on = false;  // a replica that has no gradient counts as zeros at its place, where another has one
  std::shared_ptr<ProcessGroup> group = nullptr;  // the replicas of all its ranks are summed; null: those here are all
  bool find_unused = false;                       // with a group: parameters that no replica has reached are left alone
};

/// Gives the gradients of each replica a place in that replica's bucket, one for each dtype, and sums them at the end
/// of a backward.
///
/// CPU devices share memory: all at once, each sums a slice of every bucket. The sums are written to the buckets of all
/// replicas and not to the first alone. Reading another core's memory leaves a line that both share, and the next
/// backward's write to such a line is several times as slow as to one that some core has written last.
///
/// CUDA devices do not: pairs of them add, the one copying the other's bucket, until the first has the sum. Copies and
/// sums are given to the devices' streams; the program does not wait for them.
class ReplicaReducer {
 public:
  /// A parameter as its replicas see it: replica i's leaf.
  struct Leaves {
    std::string name;
    Tensor master;
    std::vector<std::shared_ptr<autograd::LeafNode>> replicas;
  };
  /// `replica_devices[i]` is where replica i is; `devices` are the same, each once.
  ReplicaReducer(std::vector<Leaves> parameters, std::span<const Device> replica_devices, std::vector<Device> devices,
                 const FixedSums& fixed = {});
  /// Where device i's share of parameter number `index` begins, for i up to the number of devices, where it ends. Of
  /// use where devices share memory.
  std::vector<int64_t> cuts(std::size_t index) const;
  /// Adds the gradients that the replicas have to those of the masters, whose hooks see the sums. The order is a
  /// balanced binary tree over the replicas, so that the bits depend on no device and no thread.
  void reduce();
  /// Drops the gradients that the replicas have, in place of reduce.
  void discard();

 private:
  struct Sum;
  std::vector<Sum> collect();
  void add_up(const std::vector<Sum>& sums) const;
  void add_slices(const std::vector<Sum>& sums) const;
  void add_pairs(const std::vector<Sum>& sums) const;
  std::vector<Leaves> parameters_;
  std::vector<Device> replica_devices_, devices_;
  bool fixed_;
  std::optional<RankSums> ranks_;
  std::vector<std::vector<int64_t>> cuts_;
  std::vector<std::vector<Tensor>> buckets_;  // by dtype, then by replica
};

}  // namespace tandem::parallel
