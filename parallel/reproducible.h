// Training with the same bits on any number of devices and ranks: the loss of a batch, computed in parts that depend on
// nothing but the batch and their number.
#pragma once
#include <memory>
#include <string>

#include <tandem/nn/loss.h>
#include <tandem/parallel/comm/process_group.h>
#include <tandem/tensor/callable.h>
#include <tandem/tensor/random.h>

namespace tandem::parallel {

class Replicas;

// Note [Identical bits]: the batch is cut into S parts by balanced_sizes. Part i is copied to memory of its own, and
// computed by replica i as kernel calls that keep to one thread, forward and backward. What it draws in its forward
// depends on the seed, i, and the number of the loss, which every rank counts and takes from rank 0. Values,
// normalisers and gradients are added in the balanced binary tree over the S positions, where a part without rows, or
// without a gradient that another part has, counts as +0.0. Ranks have S / n consecutive parts each, so that their sums
// are nodes of that tree, and those of the ranks are its top: S is a power of two, and n divides it. What comes after
// the tree is the same calculation in all modes: the loss is the sum times the inverse of the normaliser, and a
// backward begins with that inverse.

/// The streams below are those of replicas and ranks. Who draws from stream i counts losses as the position of stream
/// kFirstCountStream + i, and draws from kFirstPartStream + i in a forward of its own. The backward of part i draws
/// from kFirstPartStream + i, too.
inline constexpr int kFirstCountStream = kMaxStreams / 4, kFirstPartStream = kMaxStreams / 2;
/// That of a forward of its own in this thread.
inline int own_forward_stream() { return kFirstPartStream + RandomStream::current() % kFirstPartStream; }

/// Throws Error unless `shards` is a power of two, at most kMaxStreams - kFirstPartStream, that `members` divides.
/// `name` is who asks, `what` what the members are called.
void check_shards(const char* name, int shards, int members, const char* what);
/// Throws Error where a forward would be recorded.
void check_no_recorded_forward(const char* name);

/// What a part contributes to a loss.
using PartOfLoss = FunctionRef<LossParts(const Tensor& output, const Tensor& target)>;
/// That of a function that gives the mean or the sum over rows. Error of the wrapper `name` unless it is one number.
LossParts part_of_loss(const char* name, FunctionRef<Tensor(const Tensor&, const Tensor&)> function,
                       Reduction reduction, const Tensor& output, const Tensor& target);

/// Where the parts of a batch are computed.
struct Shards {
  const char* name = "";                         // of the wrapper, for errors
  int count = 0;                                 // S
  std::shared_ptr<Replicas> replicas = nullptr;  // as many as there are parts, or parts of this rank
  std::shared_ptr<ProcessGroup> group = nullptr;
  Device output_device = {};
};
/// The loss of the whole batch, on every rank. Every rank gives the whole batch; what else fails on one rank, `check`
/// for the first thing, is an error on all. When all have passed that, all call `begin`, which may communicate, with
/// whether the replicas of any rank are no longer current. Throws Error for Reduction::none. `criterion` says what
/// `part_of` computes, which the ranks compare.
Tensor reproducible_loss(const Shards& shards, const std::string& criterion, Reduction reduction, const Tensor& x,
                         const Tensor& y, PartOfLoss part_of, FunctionRef<void()> check, FunctionRef<void(bool)> begin);
/// What the collectives of loss are part of, and what an error says where ranks have different losses.
inline constexpr const char* kPurposeOfLoss = "loss of a DistributedDataParallel";
inline constexpr const char* kSameLoss = "call loss with the same criterion and options on every rank";

}  // namespace tandem::parallel
