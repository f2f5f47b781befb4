// Checkpoints of a job: one file that rank 0 writes, with the random state of every rank.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <tandem/parallel/comm/process_group.h>
#include <tandem/tensor/io/checkpoint.h>

namespace tandem::parallel {

/// As save(path, parts) on rank 0, with the random state of every rank. Every rank calls it, and it returns when the
/// file is there. The timeout is not for the writing: the others wait as long as rank 0 lives. Where it cannot be
/// written, Error on rank 0 that says why, and CommError with it on the others. Where all ranks have one random state,
/// as with reproducible_shards, the file is what save writes: it loads on any number of ranks, and by load.
void save_checkpoint(const std::string& path, const std::vector<StateRef<const Stateful>>& parts,
                     const std::shared_ptr<ProcessGroup>& group = nullptr);
/// As load(path, parts), with the random state that this rank had. Every rank calls it and reads the file. Error where
/// the file does not fit, or has the random states of another number of ranks: then nothing has changed on this rank,
/// and the others get a CommError with the reason. Error on every rank, and nothing has changed, where the ranks see
/// different files.
void load_checkpoint(const std::string& path, const std::vector<StateRef<Stateful>>& parts,
                     const LoadOptions& options = {}, const std::shared_ptr<ProcessGroup>& group = nullptr);

}  // namespace tandem::parallel
