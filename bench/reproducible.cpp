// What identical bits cost: a training step with reproducible_shards against the plain one of the same mode, in turn
// within each round.
#include <chrono>
#include <ctime>

#include <tandem/tandem.h>

#include "model.h"
#include "options.h"
#include "timing.h"

using namespace tandem;

namespace {

struct Settings {
  std::vector<std::int64_t> batch_sizes{64, 512};
  std::vector<int> parts{2, 4};
  std::string optimizer = "sgd";
  int layers = 2, devices = 2, rounds = 15, steps = 20;
  std::int64_t width = 512;
  bool cpu_time = false;
};

double microseconds_now(const Settings& s) {
  if (!s.cpu_time)
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) * 1e-3;
}

// A step of training; `parts` 0 is the plain one.
class Side {
 public:
  Side(const Settings& s, bool ddp, std::int64_t rows, int parts)
      : net_(bench::make_mlp(s.layers, s.width)), x_(rand({rows, 784})), y_(randint(0, 10, {rows})) {
    if (ddp) {
      ddp_.emplace(net_, parallel::DistributedDataParallelOptions{.reproducible_shards = parts});
      const std::int64_t rank = parallel::rank(), ranks = parallel::world_size();
      const std::int64_t begin = rows * rank / ranks, end = rows * (rank + 1) / ranks;
      if (parts == 0) {
        x_ = x_.slice(0, begin, end).clone();
        y_ = y_.slice(0, begin, end).clone();
      }
    } else {
      dp_.emplace(net_, parallel::DataParallelOptions{.reproducible_shards = parts});
    }
    optimizer_ = bench::make_optimizer(s.optimizer == "adam", net_->parameters(), 1e-6);
  }
  void step() {
    (ddp_ ? ddp_->loss(criterion_, x_, y_) : dp_->loss(criterion_, x_, y_)).backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

 private:
  std::shared_ptr<nn::SequentialImpl> net_;
  Tensor x_, y_;
  std::optional<parallel::DataParallel> dp_;
  std::optional<parallel::DistributedDataParallel> ddp_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  nn::CrossEntropyLoss criterion_;
};

// Ranks take the same steps in the same order, so their number is given and not found by the clock.
void measure(const Settings& s, const std::string& mode, bool ddp) {
  for (const std::int64_t rows : s.batch_sizes) {
    std::vector<std::unique_ptr<Side>> sides;
    sides.push_back(std::make_unique<Side>(s, ddp, rows, 0));
    for (const int parts : s.parts) sides.push_back(std::make_unique<Side>(s, ddp, rows, parts));
    std::vector<std::vector<double>> times(sides.size());
    for (int round = 0; round <= s.rounds; ++round)  // the first is not counted
      for (std::size_t k = 0; k < sides.size(); ++k) {
        const std::size_t i = (k + static_cast<std::size_t>(round)) % sides.size();
        for (int step = 0; step < 3; ++step) sides[i]->step();  // brings its data back into the caches
        const double start = microseconds_now(s);
        for (int step = 0; step < s.steps; ++step) sides[i]->step();
        if (round > 0) times[i].push_back((microseconds_now(s) - start) / s.steps);
      }
    if (parallel::rank() != 0) continue;
    std::string text = fmt::format("{:8} {:4} rows: plain {:6.0f} us", mode, rows, bench::median(times[0]));
    for (std::size_t i = 1; i < sides.size(); ++i)
      text += fmt::format(", {} parts {:6.0f} us ({:.2f} times)", s.parts[i - 1], bench::median(times[i]),
                          bench::median_ratio(times[i], times[0]));
    fmt::print("{}\n", text);
  }
}

int run(const Settings& s) {
  const int code = parallel::spawn(
      [&](int, int) {
        set_num_threads(1);
        parallel::init_process_group();
        measure(s, fmt::format("ddp {}", parallel::world_size()), true);
        parallel::destroy_process_group();
      },
      {.nprocs = s.devices});
  if (code != 0) return code;
  for (const int devices : {1, s.devices}) {
    set_num_threads(devices);
    set_cpu_device_count(devices);
    measure(s, devices == 1 ? "one" : fmt::format("dp {}", devices), false);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Settings s;
  bench::Options options(
      "A step of the MLP with reproducible_shards against the plain step: on one device, with DataParallel, with "
      "DistributedDataParallel; one thread a device.\n\n  reproducible --batch-size 64,512 --parts 2,4");
  options.number("--batch-size", &s.batch_sizes, "rows of all devices together", 1, 1 << 20);
  options.number("--parts", &s.parts, "reproducible_shards: multiples of --devices");
  options.word("--optimizer", &s.optimizer, "sgd or adam", {"sgd", "adam"});
  options.number("--devices", &s.devices, "devices and ranks", 2, 64);
  options.number("--layers", &s.layers, "hidden layers", 1, 1000);
  options.number("--width", &s.width, "of a hidden layer", 1, 1 << 16);
  options.number("--rounds", &s.rounds, "of all sides in turn", 1);
  options.number("--steps", &s.steps, "of a side in a round", 1);
  options.flag("--cpu-time", &s.cpu_time,
               "processor time of the process, for a busy machine; on several devices that includes waiting");
  if (const std::optional<int> code = options.parse(argc, argv)) return *code;
  try {
    return run(s);
  } catch (const Error& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
