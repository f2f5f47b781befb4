// Work that rank 0 does for all, and that may last longer than ranks wait for each other.
#pragma once
#include <tandem/parallel/comm/process_group.h>
#include <tandem/tensor/callable.h>

namespace tandem::parallel {

/// Calls `work` on rank 0, in a thread of its own; every rank calls this, and it returns when that is done. The timeout
/// is not for the work: the others wait as long as rank 0 lives. What `work` throws is thrown on rank 0, and is a
/// CommError on the others.
void on_rank_0(FunctionRef<void()> work, ProcessGroup& group);

}  // namespace tandem::parallel
