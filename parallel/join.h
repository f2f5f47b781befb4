// join: training where the ranks have different numbers of batches.
#pragma once
#include <memory>

#include <tandem/parallel/comm/process_group.h>
#include <tandem/tensor/callable.h>

namespace tandem::parallel {

/// The same on all ranks.
struct JoinOptions {
  /// What a backward through forward() averages over: all ranks of the group, or else those that still have batches.
  /// The gradient of DistributedDataParallel::loss is that of all rows in either case.
  bool divide_by_initial_world_size = true;
  bool throw_on_early_termination = false;  // as soon as one rank has ended and another has not, Error on every rank
};

/// Runs `body`, the loop over this rank's batches, which may be fewer than another rank's, or none. While others go on,
/// a rank whose loop is over takes part in what their wrapped models and sharded optimizers do together, without rows
/// of its own. Returns when all loops are over, the same on every rank: the lowest of the ranks that went on longest,
/// whose parameters and buffers all ranks then have. What an optimizer has stored, such as momentum, is as it was when
/// a rank's loop ended: broadcast_state(optimizer, group, root), with what is returned as root, gives it to all.
///
/// Every rank of the group (default: all) calls it. Collectives of the body's own are not taken part in: with one rank
/// ended they are a CommError on all that names both calls. Models are wrapped, and optimizers divided, before it: in
/// it that is an Error, as is a join inside another. An exception of the body goes on here, and is a CommError on the
/// others. Then nothing is repaired: ranks whose loops were over lack the steps since, and their CommError says so.
int join(FunctionRef<void()> body, const JoinOptions& options = {},
         const std::shared_ptr<ProcessGroup>& group = nullptr);

}  // namespace tandem::parallel
