// Processes over shared memory: collectives, and DistributedDataParallel against one device. Ends with 1 on a fault.
#include <chrono>
#include <optional>
#include <thread>

#include <tandem/tandem.h>

using namespace tandem;

namespace {

void require(bool ok, std::string_view what) { check(ok, "distributed_program", "does not hold: {}", what); }

template <class Body>
void require_error(std::string_view part, const Body& body) {
  try {
    body();
  } catch (const Error& e) {
    check(std::string_view(e.what()).find(part) != std::string_view::npos, "distributed_program",
          "'{}' is missing in: {}", part, e.what());
    return;
  }
  require(false, part);
}

void collectives(int rank, int ranks) {
  for (const DType dtype : {float32, float64, int64, int32}) {
    Tensor t = full({5}, rank + 1).to(dtype);
    parallel::all_reduce(t);
    require(t.to_vector<int>() == std::vector<int>(5, ranks * (ranks + 1) / 2), "sum");
    t = full({3}, rank).to(dtype);
    parallel::all_reduce(t, {.op = parallel::ReduceOp::max});
    require(t.to_vector<int>() == std::vector<int>(3, ranks - 1), "max");
    t = full({3}, rank + 2).to(dtype);
    parallel::all_reduce(t, {.op = parallel::ReduceOp::min});
    require(t.to_vector<int>() == std::vector<int>(3, 2), "min");
  }
  Tensor large = full({2'500'000}, rank + 0.5);  // more than one piece
  parallel::all_reduce(large, {.op = parallel::ReduceOp::avg});
  require(equal(large, full({2'500'000}, 0.5 + (ranks - 1) / 2.0)), "average of a large tensor");
  Tensor view = arange(6).to(float32).view({2, 3}).t();
  parallel::all_reduce(view);
  require(equal(view.contiguous(), arange(6).to(float32).view({2, 3}).t().contiguous() * ranks), "sum of a view");
  Tensor root = full({3}, rank);
  parallel::broadcast(root, ranks - 1);
  require(equal(root, full({3}, ranks - 1)), "broadcast");
  Tensor none = zeros({0});
  parallel::all_reduce(none);
  require_error("root 9 is out of range", [&] { parallel::broadcast(root, 9); });
  const auto first_two = parallel::new_group({0, 1});
  if (rank < 2) {
    Tensor t = ones({1});
    parallel::all_reduce(t, {.group = first_two});
    require(t.item<int>() == 2, "sum in a group");
  } else {
    require_error("not a member", [&] { parallel::barrier({.group = first_two}); });
  }
  Tensor whole = ones({1}, {.dtype = int64});
  require_error("average of int64", [&] { parallel::all_reduce(whole, {.op = parallel::ReduceOp::avg}); });
  require_error("start all processes in one call", [] { parallel::spawn([](int, int) {}, {.nprocs = 2}); });
  parallel::barrier();
}

// A rank that does not come is named.
void silent_rank(int rank) {
  parallel::init_process_group({.timeout_seconds = 0.3});
  if (rank == 2) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
  } else {
    require_error("for rank 2 (last seen making the group), which is stopped, slow", [] { parallel::barrier(); });
  }
  parallel::destroy_process_group();
}

std::vector<Tensor> train(bool distributed, int rank, int ranks, int64_t rows) {
  manual_seed(distributed ? 100 + rank : 100);  // rank 0's weights win
  auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(6, 16), nn::ReLU(), nn::Linear(16, 4));
  net->to(float64);
  std::optional<parallel::DistributedDataParallel> ddp;
  if (distributed) ddp.emplace(net);
  optim::Adam optimizer(net->parameters(), {.lr = 1e-2});
  const nn::CrossEntropyLoss loss_fn({.weight = tensor({1.0, 0.5, 2.0, 0.0}, {.dtype = float64}), .ignore_index = 1});
  manual_seed(3);
  for (int i = 0; i < 20; ++i) {
    const Tensor x = randn({rows, 6}, {.dtype = float64}), y = randint(0, 4, {rows});
    const int64_t begin = rows * rank / ranks, end = rows * (rank + 1) / ranks;
    const Tensor loss =
        ddp ? ddp->loss(loss_fn, x.slice(0, begin, end), y.slice(0, begin, end)) : loss_fn((*net)(x), y);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return net->parameters();
}

void run(int rank, int ranks) {
  require_error("call init_process_group first", [] { (void)parallel::default_group(); });
  require_error("\"shm\"", [] { parallel::init_process_group({.backend = "pigeon"}); });
  parallel::init_process_group();
  require_error("joined already", [] { parallel::init_process_group(); });
  require(parallel::rank() == rank && parallel::world_size() == ranks, "rank and size");
  collectives(rank, ranks);
  for (const int64_t rows : {8, 7, 1}) {  // also fewer rows than ranks
    const auto mine = train(true, rank, ranks, rows), expected = train(false, rank, ranks, rows);
    for (std::size_t i = 0; i < mine.size(); ++i)
      require(allclose(mine[i], expected[i], 1e-10, 1e-10), "DDP equals one device");
  }
  // pytorch#128949: an unused parameter must never pass silently.
  struct FirstOnly : nn::Module {
    Tensor forward(const Tensor& x) override { return a(x); }
    nn::Linear a = register_module("a", nn::Linear(2, 2)), b = register_module("b", nn::Linear(2, 2));
  };
  parallel::DistributedDataParallel unused(std::make_shared<FirstOnly>());
  require_error("'b.weight' got no gradient", [&] { sum(unused(ones({2, 2}))).backward(); });
  // NVIDIA/nccl#1394: sizes that differ are an error on every rank.
  require_error("the ranks disagree", [&] {
    Tensor t = zeros({rank == 0 ? 4 : 5});
    parallel::all_reduce(t);
  });
  require_error("all_reduce (max", [&] {
    Tensor t = zeros({4});
    parallel::all_reduce(t, {.op = rank == 0 ? parallel::ReduceOp::max : parallel::ReduceOp::sum});
  });
  parallel::destroy_process_group();
}

}  // namespace

int main() {
  if (const int code = parallel::spawn(run, {.nprocs = 3}); code != 0) return code;
  return parallel::spawn([](int rank, int) { silent_rank(rank); }, {.nprocs = 3});
}
