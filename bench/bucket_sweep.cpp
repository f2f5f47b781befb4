// bucket_sweep: the step of DistributedDataParallel against the size of its buckets, on 32 equal layers 256 to 256.
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
  std::vector<double> caps_mb{0.01, 0.25, 0.5, 1, 2, 4, 8, 25};
  std::int64_t batch_size = 64;
  int nproc = 2, layers = 32, rounds = 21;
  std::int64_t width = 256;
  bool adam = false;
  std::string backend, json_file;
};

// A model of its own for each size; the sizes are measured in turn within each round.
struct Side {
  std::shared_ptr<nn::SequentialImpl> net = std::make_shared<nn::SequentialImpl>();
  std::optional<parallel::DistributedDataParallel> ddp;
  std::unique_ptr<optim::Optimizer> optimizer;
  Tensor x, y;

  Side(const Settings& s, double cap_mb) {
    manual_seed(0);
    for (int i = 0; i < s.layers; ++i) {
      net->push_back(nn::Linear(s.width, s.width));
      net->push_back(nn::ReLU());
    }
    const std::int64_t rows =
        s.batch_size * (parallel::rank() + 1) / s.nproc - s.batch_size * parallel::rank() / s.nproc;
    x = rand({rows, s.width});
    y = randint(0, s.width, {rows});
    ddp.emplace(net, parallel::DistributedDataParallelOptions{.bucket_cap_mb = cap_mb,
                                                              .first_bucket_mb = std::min(cap_mb, 1.0)});
    optimizer = bench::make_optimizer(s.adam, net->parameters(), 1e-6);
  }
  void step() {
    ddp->loss(nn::CrossEntropyLoss(), x, y).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
};

void measure(const Settings& s, int rank) {
  using Clock = std::chrono::steady_clock;
  std::vector<std::unique_ptr<Side>> sides;
  for (const double cap : s.caps_mb) sides.push_back(std::make_unique<Side>(s, cap));
  for (const auto& side : sides)
    for (int i = 0; i < 5; ++i) side->step();
  constexpr int kSteps = 15;
  std::vector<std::vector<double>> times(sides.size()), waits(sides.size());
  for (int round = 0; round < s.rounds; ++round)
    for (std::size_t k = 0; k < sides.size(); ++k) {
      const std::size_t i = (k + static_cast<std::size_t>(round)) % sides.size();
      sides[i]->step();
      parallel::barrier();
      const auto start = Clock::now();
      for (int n = 0; n < kSteps; ++n) sides[i]->step();
      times[i].push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() / kSteps);
      waits[i].push_back(sides[i]->ddp->logging_data().exposed * 1e6);
    }
  if (rank != 0) return;
  nlohmann::json records = nlohmann::json::array();
  fmt::print("{} layers {} to {}, batch {}, {} processes, {}\n", s.layers, s.width, s.width, s.batch_size, s.nproc,
             parallel::default_group()->backend());
  fmt::print("{:>12} {:>8} {:>24} {:>18} {:>16}\n", "bucket (MiB)", "buckets", "step [p10, p90] (us)",
             "exposed wait (us)", "to the best");
  std::size_t best = 0;
  for (std::size_t i = 1; i < sides.size(); ++i)
    if (bench::median(times[i]) < bench::median(times[best])) best = i;
  for (std::size_t i = 0; i < sides.size(); ++i) {
    const std::size_t buckets = sides[i]->ddp->logging_data().buckets.size();
    const double median = bench::median(times[i]), p10 = bench::quantile(times[i], 0.1),
                 p90 = bench::quantile(times[i], 0.9), ratio = bench::median_ratio(times[i], times[best]);
    fmt::print("{:>12} {:>8} {:>24} {:>18.0f} {:>16.2f}\n", s.caps_mb[i], buckets,
               fmt::format("{:.0f} [{:.0f}, {:.0f}]", median, p10, p90), bench::median(waits[i]), ratio);
    records.push_back({{"bucket_cap_mb", s.caps_mb[i]},
                       {"buckets", buckets},
                       {"batch_size", s.batch_size},
                       {"nproc", s.nproc},
                       {"layers", s.layers},
                       {"width", s.width},
                       {"backend", parallel::default_group()->backend()},
                       {"median_us", median},
                       {"p10_us", p10},
                       {"p90_us", p90},
                       {"exposed_us", bench::median(waits[i])},
                       {"ratio", ratio}});
  }
  if (!s.json_file.empty())
    check(bench::write_json(s.json_file, records.dump(1)), "bucket_sweep", "{} cannot be written", s.json_file);
}

}  // namespace

int main(int argc, char** argv) {
  Settings s;
  std::string optimizer = "sgd";
  bench::Options options(
      "The training step of DistributedDataParallel against the size of its gradient buckets, on equal layers with "
      "ReLU. "
      "All sizes take turns within one run; times are medians over rounds.");
  options.number("--bucket-mb", &s.caps_mb, "bucket sizes in MiB, a comma-separated list", 1e-6);
  options.number("--batch-size", &s.batch_size, "rows of all processes together", 1);
  options.number("--nproc", &s.nproc, "processes, one thread each", 1, 64);
  options.number("--layers", &s.layers, "layers", 1, 1000);
  options.number("--width", &s.width, "inputs and outputs of each layer", 1);
  options.word("--optimizer", &optimizer, "sgd, adam", {"sgd", "adam"});
  options.word("--backend", &s.backend, "process group: shm, gloo (default: the best)");
  options.number("--rounds", &s.rounds, "interleaved rounds", 1);
  options.word("--json", &s.json_file, "write the records to this file");
  if (const std::optional<int> code = options.parse(argc, argv)) return *code;
  s.adam = optimizer == "adam";
  return bench::run_ranks(s.nproc, s.backend, [&](int rank) { measure(s, rank); });
}
