#include <tandem/tests/cuda/nccl_cases.h>

#include <algorithm>
#include <functional>

#include <tandem/autograd/functions.h>
#include <tandem/tensor/create.h>
#include <tandem/tests/parallel/collective_cases.h>

namespace tandem::test {

using parallel::ProcessGroup;
using parallel::ReduceOp;
using parallel::Work;

namespace {

// NCCL adds in an order of its own, and rounds 16-bit numbers at each step.
void require_alike(const Tensor& gpu, const Tensor& cpu, std::string_view what) {
  const double tolerance = size_of(cpu.dtype()) == 2 ? 0.1 : 1e-5;
  const Tensor a = gpu.to(Device());
  require(a.shape() == cpu.shape() && a.dtype() == cpu.dtype(), what);
  if (is_floating(cpu.dtype()))
    require(allclose(a.to(float64), cpu.to(float64), tolerance, tolerance), what);
  else
    require(same_bits(a, cpu), what);
}

std::vector<ReduceOp> operations_for(DType dtype) {
  if (dtype == boolean) return {ReduceOp::min, ReduceOp::max};
  std::vector<ReduceOp> result{ReduceOp::sum, ReduceOp::product, ReduceOp::min, ReduceOp::max};
  if (is_floating(dtype)) result.push_back(ReduceOp::avg);
  return result;
}

// Calls a collective on both devices, and compares what it leaves in its tensors.
class Both {
 public:
  Both(Device device, std::string what) : device_(device), what_(std::move(what)) {}
  using Call = std::function<void(std::vector<Tensor>&)>;
  void operator()(const std::vector<Tensor>& tensors, const Call& call) const {
    std::vector<Tensor> cpu, gpu;
    for (const Tensor& t : tensors) {
      cpu.push_back(t.defined() ? t.clone() : t);
      gpu.push_back(t.defined() ? t.to(device_) : t);
    }
    call(cpu);
    call(gpu);
    for (std::size_t i = 0; i < cpu.size(); ++i)
      if (cpu[i].defined()) require_alike(gpu[i], cpu[i], what_);
  }

 private:
  const Device device_;
  const std::string what_;
};

void combinations(ProcessGroup& group, Device device, DType dtype, std::int64_t count) {
  const int n = group.size(), me = group.rank();
  for (const ReduceOp op : operations_for(dtype)) {
    const std::string how = fmt::format(" ({}, {} {})", static_cast<int>(op), count, dtype);
    const Tensor mine = values_of(me, count, dtype), wide = values_of(me, count * n, dtype, 1);
    Both(device, "all_reduce" + how)({mine}, [&](auto& t) { group.all_reduce(t[0], op).wait(); });
    Both(device, "reduce" + how)({mine}, [&](auto& t) { group.reduce(t[0], n - 1, op).wait(); });
    Both(device, "reduce_scatter" + how)({mine, wide}, [&](auto& t) { group.reduce_scatter(t[0], t[1], op).wait(); });
    Both(device, "reduce_scatter in place" + how)({wide.view({n, count})}, [&](auto& t) {
      Tensor own = t[0][me];
      group.reduce_scatter(own, t[0], op).wait();
      t[0] = own;
    });
  }
}

void moves(ProcessGroup& group, Device device, DType dtype, std::int64_t count) {
  const int n = group.size(), me = group.rank();
  const std::string how = fmt::format(" of {} {}", count, dtype);
  const Tensor mine = values_of(me, count, dtype), wide = values_of(me, count * n, dtype, 1);
  Both(device, "all_gather" + how)({wide, mine}, [&](auto& t) { group.all_gather(t[0], t[1]).wait(); });
  Both(device, "all_gather in place" + how)({wide.view({n, count})},
                                            [&](auto& t) { group.all_gather(t[0], t[0][me]).wait(); });
  Both(device, "all_to_all" + how)({values_of(me, count * n, dtype), wide},
                                   [&](auto& t) { group.all_to_all(t[0], t[1]).wait(); });
  for (int root = 0; root < n; ++root) {
    const bool is_root = me == root;
    Both(device, "broadcast" + how)({mine}, [&](auto& t) { group.broadcast(t[0], root).wait(); });
    Both(device, "gather" + how)({is_root ? wide : Tensor(), mine},
                                 [&](auto& t) { group.gather(t[0], t[1], root).wait(); });
    Both(device, "scatter" + how)({mine, is_root ? wide : Tensor()},
                                  [&](auto& t) { group.scatter(t[0], t[1], root).wait(); });
    Both(device, "scatter in place" + how)({wide.view({n, count})}, [&](auto& t) {
      Tensor own = t[0][me];
      group.scatter(own, is_root ? t[0] : Tensor(), root).wait();
      t[0] = own;
    });
  }
  if (n == 1) return;
  Both(device, "messages" + how)({mine, values_of(9, count, dtype)}, [&](auto& t) {  // all send first
    const Work sent = group.send(t[0], (me + 1) % n);
    group.recv(t[1], (me + n - 1) % n).wait();
    sent.wait();
  });
}

}  // namespace

void gpu_collective_cases(ProcessGroup& group, Device device) {
  for (int d = 0; d < kDTypeCount; ++d)
    for (const std::int64_t count : {0, 1, 5, 1100}) {
      combinations(group, device, static_cast<DType>(d), count);
      moves(group, device, static_cast<DType>(d), count);
    }
  combinations(group, device, float32, 100'000);
}

void gpu_order_cases(ProcessGroup& group, Device device) {
  const int n = group.size(), me = group.rank();
  const double total = n * (n + 1) / 2.0;
  const TensorOptions here{.device = device};
  const auto is = [](const Tensor& t, double value) {
    return same_bits(t.to(Device()), full(t.shape(), value, {.dtype = t.dtype()}));
  };

  Tensor view = zeros({3, 4}, here).t(), part = zeros({2, 3, 2}, here).select(2, 1);
  Tensor whole = zeros({2, n, 3}, here).transpose(0, 1);
  view.fill_(me + 1);
  group.all_reduce(view).wait();
  require(is(view, total), "all_reduce of a view");
  part.fill_(me);
  group.all_gather(whole, part).wait();
  for (int r = 0; r < n; ++r) require(is(whole[r], r), "all_gather of views");

  // Waited for in reverse, some dropped.
  std::vector<Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < 30; ++i) {
    tensors.push_back(full({i % 3 == 0 ? 5000 : 10}, (me + 1.0) * (i + 1), here));
    Work work = group.all_reduce(tensors.back());
    if (i % 4 != 0) works.push_back(std::move(work));
  }
  std::ranges::reverse(works);
  for (const Work& w : works) w.wait();
  group.barrier().wait();
  for (int i = 0; i < 30; ++i) require(is(tensors[static_cast<std::size_t>(i)], total * (i + 1)), "works in reverse");
  Tensor polled = full({3}, me + 1.0, here);
  const Work work = group.all_reduce(polled);
  while (!work.is_completed()) {
  }
  require(work.exception() == nullptr && is(polled, total), "a work that is only asked for");
  Tensor limited = full({3}, me + 1.0, here);
  require(group.all_reduce(limited).wait(60.0) && is(limited, total), "a wait with a limit");

  Tensor dropped = zeros({3, 4}, here).t();
  dropped.fill_(me + 1);
  (void)group.all_reduce(dropped);
  group.barrier().wait();
  require(is(dropped, total), "all_reduce of a view whose work is dropped");
  {
    Tensor gone = full({100'000}, me + 1.0, here);  // must live as long as the device works on it
    (void)group.all_reduce(gone);
  }
  Tensor next = full({100'000}, 7.0, here);
  group.barrier().wait();
  require(is(next, 7), "memory of a tensor that is gone is not used again too early");

  // Their effects are in order.
  Tensor memory = group.allocate({100'000}, float32, device);
  for (const std::int64_t count : {4, 5000})
    for (Tensor t : {zeros({count}, here), memory.narrow(0, 0, count), zeros({count, 2}, here).select(1, 1)}) {
      t.fill_(me + 1.0);
      Tensor all = empty({n, count}, here);
      const Work first = group.all_reduce(t), second = group.all_reduce(t, ReduceOp::max);
      (void)group.all_gather(all, t);
      const Work third = group.all_reduce(t), fourth = group.broadcast(t, n - 1);
      fourth.wait();
      require(is(t, total * n) && is(all, total), "several calls on one tensor");
      second.wait();
    }

  // Arguments are checked before anything is sent.
  if (me == n - 1) {
    Tensor four = zeros({4}, here), cpu = zeros({4}), all = zeros({4 * n});
    require_error("root 9 is out of range", [&] { group.broadcast(four, 9); });
    require_error("they must be on one device", [&] { group.all_gather(all, four); });
    Tensor wide = zeros({1}, here).expand({4});
    require_error("share one place in memory", [&] { group.all_reduce(wide); });
  }
  group.barrier().wait();
}

void gpu_memory_cases(ProcessGroup& group, Device device) {
  for (int i = 0; i < 4; ++i) {
    Tensor kept = group.allocate({1000}, float32, device);
    require(kept.device() == device && same_bits(kept.to(Device()), zeros({1000})), "memory of zeros");
    Tensor t = group.allocate({3, 7}, float64, device);
    t.fill_(group.rank() + 1.0);
    group.all_reduce(t).wait();
    require(t.to(Device())[0][0].item<double>() == group.size() * (group.size() + 1) / 2.0, "all_reduce in it");
  }
  require(group.allocate({0}, float32, device).numel() == 0, "no memory");
  require(group.allocate({5}, float32).device().is_cpu(), "memory of the host");
  if (group.size() > 1)
    require_error("the ranks disagree: rank 0 allocates 40 bytes of float32, rank",
                  [&] { (void)group.allocate({group.rank() == group.size() - 1 ? 11 : 10}, float32, device); });
}

void gpu_error_cases(ProcessGroup& group, Device device) {
  const int n = group.size(), me = group.rank();
  if (n == 1) return;
  const bool odd = me == n - 1;
  Tensor four = zeros({4}, {.device = device}), five = zeros({5}, {.device = device}), cpu = ones({2});
  const Work fine = group.all_reduce(four);
  fine.wait();
  if (group.call_count() % 2 == 0) group.barrier().wait();  // both ways are met by some number of ranks
  const Work disagreed = group.all_reduce(odd ? five : four);
  for (int i = 0; i < 2; ++i) require_error("the ranks disagree: rank", [&] { disagreed.wait(); });
  require(disagreed.is_completed() && disagreed.exception() != nullptr, "the error of a work stays");
  require_error(fmt::format("rank {} of {}: an earlier collective failed, so that the group has no more collectives on "
                            "GPUs; if no rank was lost, call destroy_process_group and init_process_group on every "
                            "rank, and make models and graphs anew: the ranks disagree: rank",
                            me, n),
                [&] { group.all_reduce(four).wait(); });
  // What one rank cannot do, the others learn.
  Tensor t = zeros({4}, {.device = odd ? Device(DeviceType::cuda, (device.index() + 1) % 4) : device});
  const std::string elsewhere = fmt::format("the tensor is on cuda:{}", n % 4);
  require_error(odd ? elsewhere : fmt::format("rank {} cannot take part in all_reduce (sum, call", n - 1),
                [&] { group.all_reduce(t).wait(); });
  require_error(odd ? elsewhere : fmt::format("rank {} cannot take part in all_gather (call", n - 1),
                [&] { (void)group.allocate({4}, float32, t.device()); });
  group.all_reduce(cpu).wait();
  require(same_bits(cpu, full({2}, 1.0 * n)), "the group works on for the CPU");
}

}  // namespace tandem::test
