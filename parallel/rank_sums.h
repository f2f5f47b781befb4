// RankSums: how the sums that each rank has over its replicas become those of all ranks (see reproducible.h).
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <tandem/parallel/comm/process_group.h>

namespace tandem::parallel {

/// Adds up gradients over the ranks in buckets of the group's memory. A backward ends with one all_reduce for each
/// bucket, and one that tells which parameters a part has reached; or with `fail` in the place of each.
class RankSums {
 public:
  /// A parameter's gradient on this rank, which becomes that of all ranks.
  struct Sum {
    Tensor total;          // zeros where no part of this rank has reached it
    bool reached = false;  // by a part of this rank, then by a part of any
  };
  RankSums(std::shared_ptr<ProcessGroup> group, bool find_unused);
  /// Memory on `device` for the gradients of these parameters, which it has at the offsets (in elements). Every rank
  /// calls it.
  Tensor allocate(std::int64_t count, DType dtype, Device device, std::vector<std::size_t> parameters,
                  std::vector<std::int64_t> offsets);
  /// `sums[p]` and `names[p]` are of parameter p. Error on every rank where no part of any rank has reached a
  /// parameter, unless find_unused.
  void add_up(std::span<Sum> sums, const std::vector<std::string>& names);
  /// In place of add_up.
  void abandon();

 private:
  struct Bucket {
    Tensor memory;  // as the group has given it
    Device device;
    std::vector<std::size_t> parameters;
    std::vector<std::int64_t> offsets;
  };
  static Tensor memory_of(const Bucket& bucket, std::span<Sum> sums);
  std::shared_ptr<ProcessGroup> group_;
  bool find_unused_;
  std::vector<Bucket> buckets_;
};

}  // namespace tandem::parallel
