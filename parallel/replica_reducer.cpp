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

// A parameter's gradients on their way into one.
struct Sum {
  std::size_t index = 0;
  std::vector<Tensor> parts;  // of the replicas that have one
  Tensor total;               // on the first device: replica 0's, or another where that has none
};

}  // namespace

ReplicaReducer::ReplicaReducer(std::vector<Leaves> parameters, std::span<const Device> replica_devices,
                               std::vector<Device> devices)
    : parameters_(std::move(parameters)), devices_(std::move(devices)), cuts_(parameters_.size()) {
  const auto k = static_cast<int64_t>(devices_.size());
  for (const DType dtype : {float32, float64}) {
    const int64_t line = kLine / static_cast<int64_t>(size_of(dtype));
    std::vector<int64_t> offsets(parameters_.size());
    int64_t total = 0;
    bool any = false;
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      if (parameters_[p].master.dtype() != dtype) continue;
      any = true;
      offsets[p] = total;
      total += round_up(parameters_[p].master.numel(), line);
    }
    if (!any) continue;
    std::vector<Tensor> buckets;
    for (const Device device : replica_devices) buckets.push_back(empty({total}, {.dtype = dtype, .device = device}));
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      const Tensor& master = parameters_[p].master;
      if (master.dtype() != dtype) continue;
      for (std::size_t i = 0; i < buckets.size(); ++i)
        parameters_[p].replicas[i]->set_destination(
            buckets[i].narrow(0, offsets[p], master.numel()).view(master.shape()));
      // Slices of the bucket, and so mostly whole parameters, cut between cache lines.
      for (int64_t j = 0; j < k; ++j)
        cuts_[p].push_back(std::clamp<int64_t>(round_up(total * j / k, line) - offsets[p], 0, master.numel()));
      cuts_[p].push_back(master.numel());
    }
  }
}

std::vector<int64_t> ReplicaReducer::cuts(std::size_t index) const { return cuts_[index]; }

void ReplicaReducer::reduce() {
  const NoGradGuard no_grad;
  std::vector<Sum> sums;
  sums.reserve(parameters_.size());
  bool any = false;
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    Leaves& leaves = parameters_[p];
    Sum sum{.index = p, .parts = {}, .total = {}};
    for (std::size_t i = 0; i < leaves.replicas.size(); ++i) {
      Tensor g = leaves.replicas[i]->take_grad();
      if (!g.defined()) continue;
      if (i == 0) sum.total = g;
      sum.parts.push_back(std::move(g));
    }
    if (sum.parts.empty()) continue;
    if (!sum.total.defined()) sum.total = leaves.replicas.front()->destination();
    if (!sum.total.defined()) sum.total = empty_like(leaves.master);
    any = any || sum.parts.size() > 1 || sum.parts.front().identity() != sum.total.identity();
    sums.push_back(std::move(sum));
  }
  if (any)
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
          to.push_back(place(part));
        }
        if (sum.parts.front().identity() != sum.total.identity()) to.push_back(place(sum.total));
        combine(dtype, ReduceOp::sum, from, to, count);
      }
    });
  for (Sum& sum : sums) {
    sum.parts.clear();
    autograd::accumulate_grad(parameters_[sum.index].master, std::move(sum.total));
  }
}

void ReplicaReducer::discard() {
  for (Leaves& leaves : parameters_)
    for (const auto& leaf : leaves.replicas) (void)leaf->take_grad();
}

}  // namespace tandem::parallel
