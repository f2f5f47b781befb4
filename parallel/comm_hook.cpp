#include <tandem/parallel/comm_hook.h>

#include <fmt/format.h>

#include <tandem/autograd/grad_mode.h>
#include <tandem/tensor/create.h>

namespace tandem::parallel {
namespace {

std::shared_ptr<ProcessGroup> or_default(std::shared_ptr<ProcessGroup> group) {
  return group ? std::move(group) : default_group();
}

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
  const std::uint64_t before = group.call_count();
  Work work;
  std::exception_ptr error;
  try {
    work = hook.run(bucket);
    const std::uint64_t started = group.call_count() - before;
    check(started == 1, "DistributedDataParallel",
          "rank {} of {}: the communication hook '{}' has started {} collectives of the model's group in its call for "
          "bucket {}; it must start one there, and others by then()",
          group.rank(), group.size(), hook.name, started, bucket.index());
  } catch (...) {
    error = std::current_exception();
  }
  if (!error) return work;
  if (group.call_count() == before)
    return fail_with(group, fmt::format("the communication hook '{}'", hook.name), error);
  return then(std::move(work), [error] { std::rethrow_exception(error); });
}

}  // namespace tandem::parallel
