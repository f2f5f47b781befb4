// A rank that trains something small with DistributedDataParallel and prints a checksum of the weights.
// usage: hosts_program STEPS [MILLISECONDS_BETWEEN_STEPS [RANK_THAT_FAILS_ON_THE_FIRST_START]]
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <tandem/tandem.h>

using namespace tandem;

namespace {

void train(int steps, int pause_ms, int failing) {
  parallel::init_process_group();
  const int rank = parallel::rank(), ranks = parallel::world_size();
  manual_seed(1);
  auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(64, 128), nn::ReLU(), nn::Linear(128, 10));
  parallel::DistributedDataParallel model(net);
  optim::Adam optimizer(model.parameters(), {.lr = 1e-2});
  const nn::CrossEntropyLoss criterion;
  const std::int64_t rows = 50, begin = rows * rank / ranks, end = rows * (rank + 1) / ranks;
  for (int step = 1; step <= steps; ++step) {
    const Tensor x = randn({rows, 64}), y = randint(0, 10, {rows});  // the same on all ranks
    model.loss(criterion, x.slice(0, begin, end), y.slice(0, begin, end)).backward();
    optimizer.step();
    optimizer.zero_grad();
    print("step {}\n", step);
    std::fflush(stdout);
    if (step == 3 && rank == failing && std::strcmp(std::getenv("RESTART_COUNT"), "0") == 0) std::_Exit(5);
    usleep(static_cast<useconds_t>(pause_ms) * 1000);
  }
  std::uint64_t sum = 14695981039346656037u;
  for (const Tensor& p : model.parameters())
    for (std::int64_t i = 0; i < p.numel(); ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, p.data<float>() + i, sizeof bits);
      sum = (sum ^ bits) * 1099511628211u;
    }
  print("weights {:016x} by {}\n", sum, parallel::default_group()->backend());
  parallel::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
  try {
    train(number(1, 1), number(2, 0), number(3, -1));
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
