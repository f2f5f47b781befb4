// Processes: joining and leaving a job, and DistributedDataParallel against one device. Ends with 1 on a fault.
// usage: distributed_program BACKEND
#include <optional>

#include <tandem/tandem.h>
#include <tandem/tests/parallel/collective_cases.h>

using namespace tandem;

using test::require;
using test::require_error;

namespace {

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

void run(int rank, int ranks, const std::string& backend) {
  require_error("call init_process_group first", [] { (void)parallel::default_group(); });
  require_error("a rank of a job that it has not joined", [] { (void)parallel::rank(); });
  require_error("backend 'pigeon' is not built in", [] { parallel::init_process_group({.backend = "pigeon"}); });
  parallel::init_process_group({.backend = backend});
  require_error("joined already", [] { parallel::init_process_group(); });
  require_error("start all processes in one call", [] { parallel::spawn([](int, int) {}, {.nprocs = 2}); });
  require(parallel::rank() == rank && parallel::world_size() == ranks, "rank and size");
  require(parallel::default_group()->backend() == backend, "backend");
  require_error("the list of ranks is empty", [] { (void)parallel::new_group({}); });
  require_error("rank 7 is out of range or order", [] { (void)parallel::new_group({0, 7}); });
  const auto first_two = parallel::new_group({0, 1});
  Tensor t = ones({1});
  if (rank < 2)
    parallel::all_reduce(t, {.group = first_two});
  else
    require_error("not a member", [&] { parallel::barrier({.group = first_two}); });
  require(t.item<int>() == (rank < 2 ? 2 : 1), "sum in a group");
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
  parallel::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string backend = argv[1];
  return parallel::spawn([&](int rank, int ranks) { run(rank, ranks, backend); }, {.nprocs = 3});
}
