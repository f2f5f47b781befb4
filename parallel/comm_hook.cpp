#include <tandem/parallel/comm_hook.h>

#include <algorithm>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include <tandem/autograd/grad_mode.h>
#include <tandem/parallel/comm/start_limit.h>
#include <tandem/tensor/create.h>

namespace tandem::parallel {
namespace {

CommHook compress_hook(const char* name, DType dtype, std::shared_ptr<ProcessGroup> group) {
  auto run = [dtype, group = or_default(std::move(group)),
              wires = std::vector<Tensor>()](GradBucket& bucket) mutable -> Work {
    Tensor& buffer = bucket.buffer();
    if (size_of(buffer.dtype()) <= size_of(dtype)) return group->all_reduce(buffer, ReduceOp::avg);
    const auto index = static_cast<std::size_t>(bucket.index());
    if (wires.size() <= index || bucket.is_last()) wires.resize(index + 1);
    Tensor& wire = wires[index];  // kept from step to step
    if (!wire.defined() || wire.numel() != buffer.numel())
      wire = empty(buffer.shape(), {.dtype = dtype, .device = buffer.device()});
    wire.copy_(buffer);
    return then(group->all_reduce(wire, ReduceOp::avg), [wire, buffer]() mutable { buffer.copy_(wire); });
  };
  return {name, std::move(run)};
}

// Ends when all that a hook has started has ended, whatever it has returned, or thrown.
class Averaging final : public Work::State {
 public:
  // `own` is the collective that the hook owes, or what has taken its place.
  Averaging(ProcessGroup& group, Work own, std::vector<Work> started, Work returned, const std::exception_ptr& error,
            GradBucket& bucket, Tensor memory)
      : group_(group),
        own_(std::move(own)),
        works_(std::move(started)),
        alone_(error != nullptr),
        bucket_(bucket),
        memory_(std::move(memory)) {
    error_ = error;
    works_.push_back(std::move(returned));
  }
  bool poll() override {
    return own_.is_completed() && std::ranges::all_of(works_, [](const Work& work) { return work.is_completed(); });
  }
  void wait() override {
    end(own_);
    // Where a rank has failed in place of its collective, nothing follows there.
    std::optional<StartLimit> closed;
    if (own_.exception()) closed.emplace(&group_, 0, kNothingFollows);
    for (const Work& work : std::exchange(works_, {})) end(work);
    verify_memory();
    if (error_) std::rethrow_exception(error_);
  }
  bool failed_alone() const override { return alone_; }

 private:
  // Waits for a part of this work.
  void end(const Work& work) {
    try {
      work.wait();
    } catch (...) {
      alone_ = work.failed_alone() && (alone_ || !error_);
      if (!error_) error_ = std::current_exception();
    }
  }
  void verify_memory() {
    Tensor& buffer = bucket_.buffer();
    if (buffer.defined() && buffer.identity() == memory_.identity()) return;
    buffer = memory_;
    alone_ = alone_ || !error_;
    if (!error_)
      error_ = std::make_exception_ptr(
          Error(fmt::format("[DistributedDataParallel] a communication hook has put another tensor in place of the "
                            "buffer of bucket {}, which the gradients are in; write into it, as by buffer().copy_(...)",
                            bucket_.index())));
  }

  ProcessGroup& group_;
  const Work own_;
  std::vector<Work> works_;
  bool alone_;
  std::exception_ptr error_;
  GradBucket& bucket_;
  const Tensor memory_;
};

}  // namespace

CommHook allreduce_hook(std::shared_ptr<ProcessGroup> group) {
  return {"allreduce", [group = or_default(std::move(group))](GradBucket& bucket) {
            return group->all_reduce(bucket.buffer(), ReduceOp::avg);
          }};
}

CommHook fp16_compress_hook(std::shared_ptr<ProcessGroup> group) {
  return compress_hook("fp16_compress", float16, std::move(group));
}

CommHook bf16_compress_hook(std::shared_ptr<ProcessGroup> group) {
  return compress_hook("bf16_compress", bfloat16, std::move(group));
}

Work run_hook(const CommHook& hook, GradBucket& bucket, ProcessGroup& group) {
  const NoGradGuard no_grad;
  const Tensor memory = bucket.buffer();
  Work returned;
  std::exception_ptr error;
  bool sent = false, stepped_out = false;
  Work own;
  std::vector<Work> works;
  {
    const std::string who = fmt::format("[DistributedDataParallel] rank {} of {}: the communication hook '{}'",
                                        group.rank(), group.size(), hook.name);
    const StartLimit limit(&group, 1,
                           fmt::format("{} wants to start a second collective of the model's group in its call for "
                                       "bucket {}; it must start one there, and others by then()",
                                       who, bucket.index()));
    try {
      returned = hook.run(bucket);
      limit.verify();
      if (limit.count() == 0)
        throw Error(fmt::format(
            "{} has started 0 collectives of the model's group in its call for bucket {}; it must "
            "start one there{}",
            who, bucket.index(),
            limit.works().empty() ? ""
                                  : ". It works in another group: give it the model's, as fp16_compress_hook(group)"));
      limit.send();
    } catch (...) {
      error = std::current_exception();
    }
    sent = limit.sent();
    stepped_out = error && sent && !limit.failed();
    own = limit.own();
    if (limit.count() > 0) works = limit.works();
  }
  const std::string what = fmt::format("the communication hook '{}'", hook.name);
  if (!sent) {
    bucket.buffer() = memory;
    own = fail_with(group, what, error);
  } else if (stepped_out) {
    give_up_after(group, what, error);
  }
  return Work(
      std::make_shared<Averaging>(group, std::move(own), std::move(works), std::move(returned), error, bucket, memory));
}

}  // namespace tandem::parallel
