// Team: members of a mesh that do a collective together. Values are combined in the tree of `combine`, so that bits are
// those of every other backend.
#pragma once
#include <cstdint>
#include <vector>

#include <tandem/parallel/comm/collective.h>
#include <tandem/parallel/comm/mesh.h>

namespace tandem::parallel {

/// Cuts the transfers into pieces. The time begins anew with each: it is for ranks that are silent, not for data that
/// move.
void exchange_in_pieces(Mesh& mesh, int lane, std::vector<Transfer> sends, std::vector<Transfer> receives,
                        double seconds);

class Team {
 public:
  static constexpr int kLane = 0;
  static constexpr std::size_t kPieceBytes = 8 << 20;  // of a tensor that move at a time

  /// `rank`, one of the `members`, is this process.
  Team(Mesh& mesh, std::vector<int> members, int rank, double seconds);
  int size() const { return static_cast<int>(members_.size()); }
  /// Peers are places in the team.
  void exchange(std::vector<Transfer> sends, std::vector<Transfer> receives);
  /// Moves and combines the data. Tensors are dense; the root and all parts are counted in the team.
  void run(const Collective& c);

 private:
  struct Range {
    std::int64_t first = 0, count = 0;
  };
  void reduce_all(const Collective& c, std::int64_t count);
  void reduce_parts(const Collective& c, std::int64_t count);
  void combine_mine(const Collective& c, const std::vector<Range>& ranges, char* result);

  Mesh& mesh_;
  std::vector<int> members_;  // their ranks in the mesh
  int place_ = 0;             // of this process
  double seconds_;
  std::vector<char> scratch_;
};

}  // namespace tandem::parallel
