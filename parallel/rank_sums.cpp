#include <tandem/parallel/rank_sums.h>

#include <exception>

#include <fmt/ranges.h>

#include <tandem/autograd/grad_mode.h>
#include <tandem/parallel/on_device.h>
#include <tandem/tensor/create.h>

namespace tandem::parallel {

RankSums::RankSums(std::shared_ptr<ProcessGroup> group, bool find_unused)
    : group_(std::move(group)), find_unused_(find_unused) {}

Tensor RankSums::allocate(std::int64_t count, DType dtype, Device device, std::vector<std::size_t> parameters,
                          std::vector<std::int64_t> offsets) {
  buckets_.push_back({group_->allocate({count}, dtype), device, std::move(parameters), std::move(offsets)});
  return on_device(buckets_.back().memory, device);
}

// The bucket, where all gradients are in their places. A gradient that somebody has kept, or that is being added to,
// has its place still, so that the new one is elsewhere: then all are copied, and nothing is written to the bucket.
Tensor RankSums::memory_of(const Bucket& bucket, std::span<Sum> sums) {
  const auto place = [&](const Tensor& memory, std::size_t k) {
    const Shape& shape = sums[bucket.parameters[k]].total.shape();
    return memory.narrow(0, bucket.offsets[k], shape.numel()).view(shape);
  };
  bool in_place = true;
  for (std::size_t k = 0; k < bucket.parameters.size(); ++k)
    in_place = in_place && sums[bucket.parameters[k]].total.raw().data == place(bucket.memory, k).raw().data;
  if (in_place) return bucket.memory;
  Tensor memory = zeros(bucket.memory.shape(), {.dtype = bucket.memory.dtype()});
  const Tensor there = on_device(memory, bucket.device);
  for (std::size_t k = 0; k < bucket.parameters.size(); ++k) {
    Tensor to = place(there, k);
    to.copy_(sums[bucket.parameters[k]].total);
    sums[bucket.parameters[k]].total = to;
  }
  return memory;
}

void RankSums::add_up(std::span<Sum> sums, const std::vector<std::string>& names) {
  const NoGradGuard no_grad;
  std::vector<Tensor> memory;
  for (const Bucket& bucket : buckets_) memory.push_back(memory_of(bucket, sums));
  memory.push_back(zeros({static_cast<std::int64_t>(sums.size())}, {.dtype = int32}));
  Tensor& reached = memory.back();
  for (std::size_t p = 0; p < sums.size(); ++p) reached.data<std::int32_t>()[p] = sums[p].reached;
  std::vector<Work> works;
  std::exception_ptr error;
  for (Tensor& t : memory) try {
      works.push_back(group_->all_reduce(t, &t == &reached ? ReduceOp::max : ReduceOp::sum));
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  for (Work& work : works) try {
      work.wait();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  if (error) std::rethrow_exception(error);
  std::vector<std::string> missing;
  for (std::size_t p = 0; p < sums.size(); ++p) {
    sums[p].reached = reached.data<std::int32_t>()[p] != 0;
    if (!sums[p].reached) missing.push_back(names[p]);
  }
  check(missing.empty() || find_unused_, "DistributedDataParallel",
        "rank {} of {}: parameter{} '{}' got no gradient in this backward on any rank; every parameter must take part "
        "in the loss: freeze it with requires_grad_(false) before wrapping, or set find_unused_parameters",
        group_->rank(), group_->size(), missing.size() > 1 ? "s" : "", fmt::format("{}", fmt::join(missing, "', '")));
}

void RankSums::abandon() {
  const std::string reason =
      fmt::format("rank {} of {}: its backward ended with an error", group_->rank(), group_->size());
  std::vector<Work> works;
  for (std::size_t i = 0; i <= buckets_.size(); ++i) try {
      works.push_back(group_->fail(reason));
    } catch (const std::exception&) {  // the backward's own error is on its way
    }
  for (Work& work : works) try {
      work.wait();
    } catch (const std::exception&) {
    }
}

}  // namespace tandem::parallel
