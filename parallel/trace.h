// The timeline of a job: what all ranks have recorded (tensor/trace.h), in one file and on one clock.
#pragma once
#include <memory>
#include <string>

#include <tandem/parallel/comm/process_group.h>

namespace tandem::parallel {

/// Writes what all ranks have recorded to a file of rank 0, which is replaced as a whole: a process of the timeline for
/// each rank. Every rank calls it. Clocks of ranks on other hosts are aligned with rank 0's to within half of the
/// shortest of some round trips between the two, which the file tells. Where ranks are threads, what threads that are
/// no rank have recorded is left out; trace::write has it too. In a program that is no rank of a job as trace::write.
/// Where it cannot be written, Error on rank 0 that says why, and CommError with it on the others.
void write_trace(const std::string& path, const std::shared_ptr<ProcessGroup>& group = nullptr);

}  // namespace tandem::parallel
