// Communication hooks: how DistributedDataParallel averages the gradients of a bucket.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <tandem/parallel/comm/process_group.h>
#include <tandem/parallel/comm/then.h>
#include <tandem/tensor/callable.h>

namespace tandem::parallel {

/// The gradients that travel together, each padded with zeros so that the next begins at a multiple of 64 bytes. It
/// stays where it is until the bucket's Work has ended, so that continuations may refer to it.
class GradBucket {
 public:
  /// `gradients` are views of `buffer`, which has one dimension.
  GradBucket(int index, bool is_last, Tensor buffer, std::vector<std::string> names, std::vector<Tensor> gradients)
      : index_(index),
        is_last_(is_last),
        buffer_(std::move(buffer)),
        names_(std::move(names)),
        gradients_(std::move(gradients)) {}
  /// Buckets are launched in this order, 0 first. Before the second backward they may be made anew.
  int index() const { return index_; }
  bool is_last() const { return is_last_; }
  /// Dense, of one type: this rank's gradients, and in the end what shall be everybody's. Write into it, as by
  /// copy_(...); assigning another tensor is an error.
  Tensor& buffer() { return buffer_; }
  const Tensor& buffer() const { return buffer_; }
  /// Views of the buffer in the shapes of the parameters.
  const std::vector<Tensor>& gradients() const { return gradients_; }
  /// Of the parameters, in the same order.
  const std::vector<std::string>& names() const { return names_; }

 private:
  int index_;
  bool is_last_;
  Tensor buffer_;
  std::vector<std::string> names_;
  std::vector<Tensor> gradients_;
};

/// What DistributedDataParallel::register_comm_hook takes. `run` is called when a bucket is complete, usually while the
/// backward goes on, and starts exactly one collective of the model's group. More may follow by `then`. When the Work
/// that it returns has ended well, the buffer must hold what shall be the gradient on all ranks, the same on each:
/// nothing is divided afterwards. The collective starts when the call has ended well. Where that throws on one rank,
/// the others are told in place of the collective, and the ranks stay in step. Only where it has waited for the
/// collective before it throws, the others may be in another one already: then the rank gives up the group
/// (ProcessGroup::give_up).
struct CommHook {
  std::string name = {};  // compared between the ranks: what must be alike on all of them
  UniqueFunction<Work(GradBucket&)> run = {};
};

// The hooks below work in a group, all ranks by default, which must be the model's.

/// What is done without a hook: the average of all ranks.
CommHook allreduce_hook(std::shared_ptr<ProcessGroup> group = nullptr);
/// The average, sent as float16: half the bytes of float32. Values are rounded on their way in, combined in float32 and
/// rounded once more. Those below 6e-8 become 0, those beyond 65504 infinite; bfloat16 has no such limits.
CommHook fp16_compress_hook(std::shared_ptr<ProcessGroup> group = nullptr);
/// The average, sent as bfloat16: the range of float32 with 8 bits of precision.
CommHook bf16_compress_hook(std::shared_ptr<ProcessGroup> group = nullptr);

/// Calls the hook as the model does. The Work ends when all that the hook has started has ended. It throws what the
/// hook has thrown, and Error when it has not started one collective of the group, or has assigned another tensor to
/// the bucket's buffer; where none has started, ProcessGroup::fail has taken its place.
Work run_hook(const CommHook& hook, GradBucket& bucket, ProcessGroup& group);

}  // namespace tandem::parallel
