// Ranks that should be alike: comparing what they have, and giving all of them what rank 0 has.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <tandem/nn/module.h>
#include <tandem/optim/optimizer.h>
#include <tandem/parallel/comm/process_group.h>

namespace tandem::parallel {

/// CommError on every rank unless all have parameters and buffers of the same names, shapes and types, frozen alike. It
/// names the first difference, both ranks and what each has. `options`, names and values, are compared too.
void verify_structure(const nn::Module& model, ProcessGroup& group,
                      const std::vector<std::pair<std::string, std::string>>& options = {});
/// The same for the values too, and for the settings and the state of the optimizer, bit by bit: names the entry and
/// the first element that differs, with both values. Costs one exchange of a hash when nothing does. Every rank calls
/// it.
void check_consistency(const nn::Module& model, const optim::Optimizer& optimizer,
                       const std::shared_ptr<ProcessGroup>& group = nullptr);
void check_consistency(const nn::Module& model, const std::shared_ptr<ProcessGroup>& group = nullptr);
/// What a wrapped model does before the first step of an optimizer: as check_consistency, without the buffers, which
/// each rank's forward may have changed. Those of the group that have `ended` a join are not compared; an ended rank
/// gives no optimizer.
void check_before_first_step(const nn::Module& model, const Stateful* optimizer, ProcessGroup& group,
                             const std::vector<int>& ended = {});
/// The same for anything else: CommError on every rank unless all have the same names with the same values, in one
/// order, but for those that have `ended` a join. It names the first difference, and ends with `advice`.
void verify_alike(const std::vector<std::pair<std::string, std::string>>& values, ProcessGroup& group,
                  const char* advice, const std::vector<int>& ended = {});
/// The guard of check_every: CommError on every rank unless the parameters are the same, bit by bit. It names the first
/// parameter in the order of registration that differs, the first element, and a rank that most are like with one that
/// is not. Costs a hash of the parameters, and one exchange of it. Ranks that have `ended` a join are not compared.
void check_divergence(const nn::Module& model, ProcessGroup& group, std::int64_t step,
                      const std::vector<int>& ended = {});

/// Copies the tensors of rank `root` into every rank's, in few pieces. A tensor that has the values already is not
/// written. They are of the same shapes and types on every rank; devices may differ.
void broadcast_tensors(const std::vector<Tensor>& tensors, int root, ProcessGroup& group);
/// Gives every rank the state of rank `root`: of an optimizer after rank 0 has loaded it, of a schedule, of a model.
/// Where it does not fit, CommError on every rank that says on which rank and why, and nothing is changed. Error for a
/// root out of range.
void broadcast_state(Stateful& state, const std::shared_ptr<ProcessGroup>& group = nullptr, int root = 0);

}  // namespace tandem::parallel
