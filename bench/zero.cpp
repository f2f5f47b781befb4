// zero: the step of DistributedDataParallel with an optimizer on every rank, and with one that is divided among them
// (ZeroRedundancyOptimizer): the state that each rank keeps, and the time.
#include <time.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include <tandem/tandem.h>

#include "model.h"
#include "options.h"
#include "ranks.h"
#include "timing.h"

using namespace tandem;

namespace {

struct Settings {
  std::int64_t batch_size = 64, width = 512;
  int nproc = 2, layers = 2, rounds = 21, steps = 10;
  std::string backend, json_file;
};

double cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

std::int64_t bytes_of(const optim::Optimizer& optimizer) {
  std::int64_t bytes = 0;
  for (const auto& [name, t] : optimizer.state_dict())
    if (t.dim() > 0) bytes += t.numel() * static_cast<std::int64_t>(size_of(t.dtype()));
  return bytes;
}

// A model with Adam, divided or not.
struct Side {
  std::shared_ptr<nn::SequentialImpl> net;
  std::optional<parallel::DistributedDataParallel> ddp;
  std::unique_ptr<optim::Optimizer> alone;
  std::optional<parallel::ZeroRedundancyOptimizer> zero;
  std::vector<double> step_us, cpu_us;  // a step's duration, and the processor time of this rank in it

  Side(const Settings& s, bool divided) : net(bench::make_mlp(s.layers, s.width)) {
    ddp.emplace(net);
    const auto make = [](const std::vector<Tensor>& p) { return bench::make_optimizer(true, p, 1e-6); };
    if (divided)
      zero.emplace(net->parameters(), make);
    else
      alone = make(net->parameters());
  }
  void step(const Tensor& x, const Tensor& y) {
    ddp->loss(nn::CrossEntropyLoss(), x, y).backward();
    zero ? zero->step() : alone->step();
    net->zero_grad();
  }
};

void measure(const Settings& s, int rank) {
  Side plain(s, false), divided(s, true);
  Side* const sides[] = {&plain, &divided};
  const std::int64_t rows = s.batch_size * (rank + 1) / s.nproc - s.batch_size * rank / s.nproc;
  const Tensor x = rand({rows, 784}), y = randint(0, 10, {rows});
  for (Side* side : sides)
    for (int i = 0; i < 5; ++i) side->step(x, y);
  for (int round = 0; round < s.rounds; ++round)
    for (std::size_t k = 0; k < 2; ++k) {
      Side& side = *sides[(k + static_cast<std::size_t>(round)) % 2];
      side.step(x, y);
      parallel::barrier();
      const double cpu = cpu_seconds();
      const auto start = std::chrono::steady_clock::now();
      for (int n = 0; n < s.steps; ++n) side.step(x, y);
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      side.cpu_us.push_back((cpu_seconds() - cpu) * 1e6 / s.steps);
      side.step_us.push_back(taken.count() * 1e6 / s.steps);
    }
  std::int64_t parameters = 0;
  for (const Tensor& p : plain.net->parameters()) parameters += p.numel() * 4;
  Tensor kept = tensor({bytes_of(*plain.alone), bytes_of(divided.zero->local())}),
         all = empty({s.nproc, 2}, {.dtype = int64});
  parallel::all_gather(all, kept);
  if (rank != 0) return;
  const std::vector<std::int64_t> bytes = all.to_vector<std::int64_t>();
  fmt::print("{} hidden layers of {}: {} bytes of parameters; Adam, batch {}, {} processes, {}\n", s.layers, s.width,
             parameters, s.batch_size, s.nproc, parallel::default_group()->backend());
  fmt::print("{:>8} {:>16} {:>16}\n", "rank", "state (bytes)", "divided (bytes)");
  for (int r = 0; r < s.nproc; ++r) {
    const auto at = 2 * static_cast<std::size_t>(r);
    fmt::print("{:>8} {:>16} {:>16}\n", r, bytes[at], bytes[at + 1]);
  }
  auto line = [](const char* what, const std::vector<double>& a, const std::vector<double>& b) {
    fmt::print("{:>8} {:>13.0f} us {:>13.0f} us {:>8.2f} of it\n", what, bench::median(a), bench::median(b),
               bench::median_ratio(b, a));
  };
  line("step", plain.step_us, divided.step_us);
  line("cpu", plain.cpu_us, divided.cpu_us);
  if (s.json_file.empty()) return;
  const nlohmann::json record = {{"layers", s.layers},
                                 {"width", s.width},
                                 {"batch_size", s.batch_size},
                                 {"nproc", s.nproc},
                                 {"backend", parallel::default_group()->backend()},
                                 {"state_bytes", bytes},
                                 {"step_us", bench::median(plain.step_us)},
                                 {"divided_step_us", bench::median(divided.step_us)},
                                 {"ratio", bench::median_ratio(divided.step_us, plain.step_us)},
                                 {"cpu_ratio", bench::median_ratio(divided.cpu_us, plain.cpu_us)}};
  check(bench::write_json(s.json_file, record.dump(1)), "zero", "{} cannot be written", s.json_file);
}

}  // namespace

int main(int argc, char** argv) {
  Settings s;
  bench::Options options(
      "DistributedDataParallel with Adam on every rank, and with Adam divided among the ranks: bytes of state of each "
      "rank, and the time of a step and its processor time on rank 0. Both take turns within one run; times are "
      "medians over rounds, and ratios the medians of those within a round.");
  options.number("--batch-size", &s.batch_size, "rows of all processes together", 1);
  options.number("--nproc", &s.nproc, "processes, one thread each", 1, 64);
  options.number("--layers", &s.layers, "hidden layers", 1, 1000);
  options.number("--width", &s.width, "of the hidden layers", 1);
  options.word("--backend", &s.backend, "process group: shm, gloo (default: the best)");
  options.number("--rounds", &s.rounds, "interleaved rounds", 1);
  options.number("--steps", &s.steps, "of each in a round", 1);
  options.word("--json", &s.json_file, "write the record to this file");
  if (const std::optional<int> code = options.parse(argc, argv)) return *code;
  return bench::run_ranks(s.nproc, s.backend, [&](int rank) { measure(s, rank); });
}
