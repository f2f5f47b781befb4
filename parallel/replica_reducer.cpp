#include <tandem/parallel/replica_reducer.h>

#include <algorithm>

#include <tandem/autograd/engine.h>
#include <tandem/parallel/comm/combine.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/threads.h>
#include <tandem/tensor/trace.h>

namespace tandem::parallel {
namespace {

constexpr int64_t kLine = 64;  // bytes

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

// A parameter's gradients on their way into one.
struct ReplicaReducer::Sum {
  std::size_t index = 0;
  bool reached = false;            // by a replica here, or of any rank
  std::vector<Tensor> parts = {};  // of the replicas that have one
  Tensor total = {};               // on the first device: replica 0's, or another where that has none
};

ReplicaReducer::ReplicaReducer(std::vector<Leaves> parameters, std::span<const Device> replica_devices,
                               std::vector<Device> devices, const FixedSums& fixed)
    : parameters_(std::move(parameters)),
      replica_devices_(replica_devices.begin(), replica_devices.end()),
      devices_(std::move(devices)),
      fixed_(fixed.on),
      cuts_(parameters_.size()) {
  if (fixed.group) ranks_.emplace(fixed.group, fixed.find_unused);
  const auto k = static_cast<int64_t>(devices_.size());
  for (const DType dtype : {float32, float64}) {
    const int64_t line = kLine / static_cast<int64_t>(size_of(dtype));
    std::vector<int64_t> offsets(parameters_.size());
    int64_t total = 0;
    std::vector<std::size_t> members;
    std::vector<int64_t> starts;
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      if (parameters_[p].master.dtype() != dtype) continue;
      members.push_back(p);
      starts.push_back(total);
      offsets[p] = total;
      total += round_up(parameters_[p].master.numel(), line);
    }
    if (members.empty()) continue;
    std::vector<Tensor> buckets;
    for (std::size_t i = 0; i < replica_devices_.size(); ++i)
      buckets.push_back(i == 0 && ranks_ ? ranks_->allocate(total, dtype, replica_devices_[i], members, starts)
                                         : empty({total}, {.dtype = dtype, .device = replica_devices_[i]}));
    for (const std::size_t p : members) {
      const Tensor& master = parameters_[p].master;
      for (std::size_t i = 0; i < buckets.size(); ++i)
        parameters_[p].replicas[i]->set_destination(
            buckets[i].narrow(0, offsets[p], master.numel()).view(master.shape()));
      // Slices of the bucket, and so mostly whole parameters, cut between cache lines.
      for (int64_t j = 0; j < k; ++j)
        cuts_[p].push_back(std::clamp<int64_t>(round_up(total * j / k, line) - offsets[p], 0, master.numel()));
      cuts_[p].push_back(master.numel());
    }
    buckets_.push_back(std::move(buckets));
  }
}

std::vector<int64_t> ReplicaReducer::cuts(std::size_t index) const { return cuts_[index]; }

// Those of every parameter that a replica has reached; with ranks, of every parameter.
std::vector<ReplicaReducer::Sum> ReplicaReducer::collect() {
  std::vector<Sum> sums;
  sums.reserve(parameters_.size());
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    Leaves& leaves = parameters_[p];
    Sum sum{.index = p};
    for (const auto& leaf : leaves.replicas) {
      sum.parts.push_back(leaf->take_grad());
      sum.reached = sum.reached || sum.parts.back().defined();
    }
    if (!sum.reached && !ranks_) continue;
    for (std::size_t i = 0; fixed_ && i < sum.parts.size(); ++i) {
      Tensor& part = sum.parts[i];
      if (part.defined()) continue;
      part = leaves.replicas[i]->destination();
      if (!part.defined())
        part = empty(leaves.master.shape(), {.dtype = leaves.master.dtype(), .device = replica_devices_[i]});
      part.zero_();
    }
    sum.total = sum.parts.front();
    std::erase_if(sum.parts, [](const Tensor& part) { return !part.defined(); });
    if (!sum.total.defined()) sum.total = leaves.replicas.front()->destination();
    if (!sum.total.defined()) sum.total = empty_like(leaves.master);
    sums.push_back(std::move(sum));
  }
  return sums;
}

void ReplicaReducer::add_up(const std::vector<Sum>& sums) const {
  const bool any = std::any_of(sums.begin(), sums.end(), [](const Sum& sum) {
    return sum.parts.size() > 1 || sum.parts.front().identity() != sum.total.identity();
  });
  if (!any) return;
  if (devices_.front().is_cpu())
    add_slices(sums);
  else
    add_pairs(sums);
}

void ReplicaReducer::add_slices(const std::vector<Sum>& sums) const {
  run_on_devices(devices_, [&](int device) {
    const auto at = static_cast<std::size_t>(device);
    const trace::DeviceSpan span("reduce", devices_[at]);
    std::vector<const void*> from;
    std::vector<void*> to;
    for (const Sum& sum : sums) {
      const int64_t begin = cuts_[sum.index][at], count = cuts_[sum.index][at + 1] - begin;
      if (count == 0) continue;
      const DType dtype = sum.total.dtype();
      auto place = [&](const Tensor& t) {
        return static_cast<char*>(t.impl()->data()) + static_cast<std::size_t>(begin) * size_of(dtype);
      };
      from.clear();
      to.clear();
      for (const Tensor& part : sum.parts) {
        from.push_back(place(part));
        if (devices_.size() > 1) to.push_back(place(part));
      }
      if (to.empty() || sum.parts.front().identity() != sum.total.identity()) to.push_back(place(sum.total));
      combine(dtype, ReduceOp::sum, from, to, count);
    }
  });
}

namespace {

// The sum of `parts` in the tree of combine, in place: in the memory of the first.
void add_tree(std::span<Tensor> parts) {
  if (parts.size() == 1) return;
  const std::size_t left = (parts.size() + 1) / 2;
  add_tree(parts.first(left));
  add_tree(parts.subspan(left));
  parts.front().add_(parts[left].to(parts.front().device()));
}

}  // namespace

void ReplicaReducer::add_pairs(const std::vector<Sum>& sums) const {
  const trace::DeviceSpan span("reduce", devices_.front());
  // Whole buckets, where every gradient is in its place; else one parameter after the other.
  const auto in_place = [&](const Sum& sum) {
    if (sum.parts.size() != replica_devices_.size()) return false;
    for (std::size_t i = 0; i < sum.parts.size(); ++i) {
      const Tensor place = parameters_[sum.index].replicas[i]->destination();
      if (!place.defined() || place.impl()->data() != sum.parts[i].impl()->data()) return false;
    }
    return true;
  };
  if (sums.size() == parameters_.size() && std::all_of(sums.begin(), sums.end(), in_place)) {
    for (std::vector<Tensor> buckets : buckets_) add_tree(buckets);
    return;
  }
  for (const Sum& sum : sums) {
    std::vector<Tensor> parts = sum.parts;
    add_tree(parts);
    if (Tensor total = sum.total; total.identity() != parts.front().identity()) total.copy_(parts.front());
  }
}

void ReplicaReducer::reduce() {
  const NoGradGuard no_grad;
  std::vector<Sum> sums = collect();
  add_up(sums);
  for (Sum& sum : sums) sum.parts.clear();
  if (ranks_) {
    std::vector<RankSums::Sum> of_ranks;
    std::vector<std::string> names;
    for (Sum& sum : sums) {
      of_ranks.push_back({std::move(sum.total), sum.reached});
      names.push_back(parameters_[sum.index].name);
    }
    ranks_->add_up(of_ranks, names);
    for (Sum& sum : sums) {
      sum.total = std::move(of_ranks[sum.index].total);
      sum.reached = of_ranks[sum.index].reached;
    }
  }
  for (Sum& sum : sums)
    if (sum.reached) autograd::accumulate_grad(parameters_[sum.index].master, std::move(sum.total));
}

void ReplicaReducer::discard() {
  for (Leaves& leaves : parameters_)
    for (const auto& leaf : leaves.replicas) (void)leaf->take_grad();
  if (ranks_) ranks_->abandon();
}

}  // namespace tandem::parallel
