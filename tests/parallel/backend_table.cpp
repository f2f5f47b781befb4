// What a backend can do: a column of the table in docs/backends.md, each line found by trying it. One rank of a job of
// two or more; with "thread" all of them. tests/checks/backends.py compares the lines with the docs.
// usage: backend_table BACKEND [INIT_METHOD]
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <tandem/tandem.h>
#include <tandem/tests/parallel/collective_cases.h>

using namespace tandem;
using parallel::ProcessGroup;
using parallel::ReduceOp;
using test::require;
using test::same_bits;
using test::values_of;

namespace {

constexpr std::int64_t kCount = 3000;

using Body = std::function<void(ProcessGroup&)>;
struct Row {
  const char* name;
  Body body;
};

// Whether a body passes on every rank.
bool passes(ProcessGroup& group, const Body& body) {
  bool passed = true;
  try {
    body(group);
  } catch (const Error& e) {
    fmt::print(stderr, "{}\n", e.what());
    passed = false;
  }
  Tensor all = full({1}, passed ? 1.0 : 0.0);
  group.all_reduce(all, ReduceOp::min).wait();
  return all.item<double>() == 1;
}

std::vector<Tensor> inputs(const ProcessGroup& group, DType dtype, std::int64_t count = kCount) {
  std::vector<Tensor> result;
  for (int r = 0; r < group.size(); ++r) result.push_back(values_of(r, count, dtype));
  return result;
}

Tensor& own(const ProcessGroup& group, std::vector<Tensor>& all) { return all[static_cast<std::size_t>(group.rank())]; }

Tensor joined(const std::vector<Tensor>& parts) {
  Tensor whole = empty({static_cast<std::int64_t>(parts.size()), kCount}, {.dtype = parts[0].dtype()});
  for (std::size_t r = 0; r < parts.size(); ++r) whole[static_cast<std::int64_t>(r)].copy_(parts[r]);
  return whole;
}

void all_reduce(ProcessGroup& group, DType dtype, ReduceOp op) {
  std::vector<Tensor> all = inputs(group, dtype);
  Tensor t = own(group, all).clone();
  group.all_reduce(t, op).wait();
  require(same_bits(t, test::combined(all, op)), "all_reduce");
}

void broadcast(ProcessGroup& group, DType dtype) {
  std::vector<Tensor> all = inputs(group, dtype);
  Tensor t = own(group, all).clone();
  group.broadcast(t, 1).wait();
  require(same_bits(t, all[1]), "broadcast");
}

void reduce(ProcessGroup& group, DType dtype, ReduceOp op) {
  std::vector<Tensor> all = inputs(group, dtype);
  Tensor t = own(group, all).clone();
  group.reduce(t, 1, op).wait();
  require(same_bits(t, group.rank() == 1 ? test::combined(all, op) : own(group, all)), "reduce");
}

void all_gather(ProcessGroup& group, DType dtype) {
  std::vector<Tensor> all = inputs(group, dtype);
  Tensor whole = empty({group.size(), kCount}, {.dtype = dtype});
  group.all_gather(whole, own(group, all)).wait();
  require(same_bits(whole, joined(all)), "all_gather");
}

void gather(ProcessGroup& group, DType dtype) {
  std::vector<Tensor> all = inputs(group, dtype);
  Tensor whole = empty({group.size(), kCount}, {.dtype = dtype});
  group.gather(whole, own(group, all), 0).wait();
  require(group.rank() != 0 || same_bits(whole, joined(all)), "gather");
}

void scatter(ProcessGroup& group, DType dtype) {
  std::vector<Tensor> all = inputs(group, dtype);
  Tensor part = empty({kCount}, {.dtype = dtype});
  group.scatter(part, group.rank() == 0 ? joined(all) : Tensor(), 0).wait();
  require(same_bits(part, own(group, all)), "scatter");
}

void reduce_scatter(ProcessGroup& group, DType dtype, ReduceOp op) {
  std::vector<Tensor> all = inputs(group, dtype, group.size() * kCount), parts;
  for (const Tensor& t : all) parts.push_back(t.narrow(0, group.rank() * kCount, kCount));
  Tensor part = empty({kCount}, {.dtype = dtype});
  group.reduce_scatter(part, own(group, all), op).wait();
  require(same_bits(part, test::combined(parts, op)), "reduce_scatter");
}

void all_to_all(ProcessGroup& group, DType dtype) {
  std::vector<Tensor> all = inputs(group, dtype, group.size() * kCount), parts;
  for (const Tensor& t : all) parts.push_back(t.narrow(0, group.rank() * kCount, kCount));
  Tensor output = empty({group.size() * kCount}, {.dtype = dtype});
  group.all_to_all(output, own(group, all)).wait();
  require(same_bits(output.view({group.size(), kCount}), joined(parts)), "all_to_all");
}

void send_and_recv(ProcessGroup& group, DType dtype) {
  std::vector<Tensor> all = inputs(group, dtype);
  const int n = group.size(), next = (group.rank() + 1) % n, before = (group.rank() + n - 1) % n;
  Tensor t = empty({kCount}, {.dtype = dtype});
  const parallel::Work sent = group.send(own(group, all), next);
  group.recv(t, before).wait();
  sent.wait();
  require(same_bits(t, all[static_cast<std::size_t>(before)]), "send, recv");
}

// Tries it in every type, and where values are combined in every way that the type has.
Body each_type(void (*body)(ProcessGroup&, DType)) {
  return [=](ProcessGroup& group) {
    for (int d = 0; d < kDTypeCount; ++d) body(group, static_cast<DType>(d));
  };
}
Body each_type(void (*body)(ProcessGroup&, DType, ReduceOp)) {
  return [=](ProcessGroup& group) {
    for (int d = 0; d < kDTypeCount; ++d)
      body(group, static_cast<DType>(d), static_cast<DType>(d) == boolean ? ReduceOp::max : ReduceOp::sum);
  };
}
Body each_way(ReduceOp op) {
  return [=](ProcessGroup& group) {
    for (const auto body : {all_reduce, reduce, reduce_scatter}) body(group, float32, op);
  };
}

void views(ProcessGroup& group) {
  Tensor wide = zeros({4, 6}), view = wide.t().narrow(0, 1, 3);
  view.fill_(1.0);
  group.all_reduce(view).wait();
  require(same_bits(view, full({3, 4}, 1.0 * group.size())), "a view");
  require(same_bits(wide.narrow(1, 0, 1), zeros({4, 1})), "the rest stays");
}

void asynchronous(ProcessGroup& group) {
  std::vector<Tensor> tensors;
  std::vector<parallel::Work> works;
  for (int i = 0; i < 10; ++i) {
    tensors.push_back(full({kCount}, 1.0 * i));
    works.push_back(group.all_reduce(tensors.back()));
  }
  for (int i = 9; i >= 0; --i) {
    require(works[static_cast<std::size_t>(i)].wait(60), "in time");
    require(works[static_cast<std::size_t>(i)].is_completed(), "completed");
    require(same_bits(tensors[static_cast<std::size_t>(i)], full({kCount}, 1.0 * i * group.size())), "a sum");
  }
}

void several_groups(ProcessGroup& group) {
  const auto pair = parallel::new_group({0, 1}), alone = parallel::new_group({0});
  Tensor in_all = ones({kCount}), in_pair = ones({kCount});
  const parallel::Work first = group.all_reduce(in_all);
  if (pair->rank() >= 0) {
    pair->all_reduce(in_pair).wait();
    require(same_bits(in_pair, full({kCount}, 2.0)), "a sum in a pair");
  }
  first.wait();
  require(same_bits(in_all, full({kCount}, 1.0 * group.size())), "a sum of all");
  require(alone->rank() == (group.rank() == 0 ? 0 : -1), "members");
}

const std::vector<Row> kRows = {
    {"`all_reduce`", each_type(all_reduce)},
    {"`broadcast`", each_type(broadcast)},
    {"`reduce`", each_type(reduce)},
    {"`all_gather`", each_type(all_gather)},
    {"`gather`", each_type(gather)},
    {"`scatter`", each_type(scatter)},
    {"`reduce_scatter`", each_type(reduce_scatter)},
    {"`all_to_all`", each_type(all_to_all)},
    {"`send`, `recv`", each_type(send_and_recv)},
    {"`barrier`", [](ProcessGroup& group) { group.barrier().wait(); }},
    {"`ReduceOp::sum`", each_way(ReduceOp::sum)},
    {"`ReduceOp::product`", each_way(ReduceOp::product)},
    {"`ReduceOp::min`", each_way(ReduceOp::min)},
    {"`ReduceOp::max`", each_way(ReduceOp::max)},
    {"`ReduceOp::avg`", each_way(ReduceOp::avg)},
    {"views that are not dense", views},
    {"asynchronous", asynchronous},
    {"several groups", several_groups},
};

std::string types(ProcessGroup& group) {
  std::vector<std::string> names;
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    const auto body = [=](ProcessGroup& g) {
      all_reduce(g, dtype, ReduceOp::max);
      all_gather(g, dtype);
    };
    if (passes(group, body)) names.push_back(fmt::format("{}", dtype));
  }
  return names.size() == kDTypeCount ? fmt::format("all {}", kDTypeCount) : fmt::format("{}", fmt::join(names, ", "));
}

std::string devices(ProcessGroup& group) {
  std::string names;
  for (const Device device : {Device(), parallel::local_device()}) {
    if (device.is_cpu() && !names.empty()) continue;  // there is no GPU
    const auto body = [=](ProcessGroup& g) {
      Tensor t = ones({kCount}).to(device);
      g.all_reduce(t).wait();
      require(same_bits(t.to(Device()), full({kCount}, 1.0 * g.size())), "a sum on a device");
    };
    if (passes(group, body)) names += fmt::format("{}{}", names.empty() ? "" : ", ", device.is_cpu() ? "cpu" : "cuda");
  }
  return names;
}

void print_column(ProcessGroup& group) {
  const auto print = [&](const char* name, const std::string& cell) {
    if (group.rank() == 0) fmt::print("{}\t{}\n", name, cell);
  };
  for (const Row& row : kRows) print(row.name, passes(group, row.body) ? "yes" : "no");
  print("types", types(group));
  print("devices", devices(group));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const std::string backend = argv[1];
  const auto run = [&](int, int) {
    parallel::init_process_group({.backend = backend, .init_method = argc > 2 ? argv[2] : "env://"});
    print_column(*parallel::default_group());
    parallel::destroy_process_group();
  };
  try {
    if (backend == "thread")
      parallel::spawn_threads(run, {.nthreads = 2});
    else
      run(0, 0);
  } catch (const Error& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
