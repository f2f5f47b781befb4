// Measures the pieces of a training step from which its time in each mode is predicted. None of the modes is run.
#pragma once
#include <memory>

#include "prediction.h"
#include "turns.h"

namespace bench {

/// The pieces on as many devices or ranks as a group has, measured in turn with whatever else there is.
class PieceTurns {
 public:
  /// Adds its turns to the list, which refer to it. Called by all ranks of the default group; those of `group` are the
  /// first of them.
  PieceTurns(const Problem& problem, const std::shared_ptr<tandem::parallel::ProcessGroup>& group,
             std::vector<Turn>& turns);
  ~PieceTurns();
  PieceTurns(PieceTurns&&) noexcept;
  /// On rank 0, once the turns of that list are taken.
  Pieces pieces(const std::vector<Turn>& turns) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};
/// DataParallel, and DistributedDataParallel with bucket sizes that make a difference to this model.
std::vector<Candidate> candidates_of(const Problem& problem, int devices);
/// What was measured, in three lines.
std::string describe(const Pieces& pieces, const std::string& backend);

}  // namespace bench
