// Measures the pieces of a training step from which its time in each mode is predicted. None of the modes is run.
#pragma once
#include <memory>

#include "prediction.h"

namespace bench {

/// The pieces on as many devices or ranks as the group has. Called by all ranks of the default group, of which these
/// are the first; rank 0 gets the result.
Pieces measure_pieces(const Problem& problem, const std::shared_ptr<tandem::parallel::ProcessGroup>& group, int rounds,
                      double round_ms);
/// DataParallel, and DistributedDataParallel with bucket sizes that make a difference to this model.
std::vector<Candidate> candidates_of(const Problem& problem, int devices);
/// What was measured, in two lines.
std::string describe(const Pieces& pieces, const std::string& backend);

}  // namespace bench
