// trace_cost: what recording a timeline costs: the training step of one device, DataParallel and
// DistributedDataParallel with recording off and on, in turn within one run.
#include <chrono>
#include <cstdlib>

#include <tandem/tandem.h>

#include "dp_vs_ddp_sides.h"
#include "options.h"
#include "timing.h"

using namespace tandem;
using bench::Mode;
using bench::Side;

namespace {

struct Settings {
  std::int64_t batch_size = 64;
  int rounds = 101, steps = 20;
};

// All ranks of ddp take the same turns.
void measure(Mode mode, const Settings& s) {
  set_num_threads(mode == Mode::dp ? 2 : 1);
  set_cpu_device_count(mode == Mode::dp ? 2 : 1);
  Side side(mode, {.batch_size = s.batch_size}, mode == Mode::dp ? 2 : 1, 1e-6);
  const auto time = [&](bool recording) {
    if (recording) trace::start();
    side.step();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < s.steps; ++i) side.step();
    const auto end = std::chrono::steady_clock::now();
    trace::stop();
    return std::chrono::duration<double, std::micro>(end - begin).count() / s.steps;
  };
  for (int i = 0; i < 3; ++i) (void)time(i % 2 == 0);
  std::vector<double> off, on;
  for (int round = 0; round < s.rounds; ++round) {
    const bool first = round % 2 == 0;
    for (const bool recording : {first, !first}) (recording ? on : off).push_back(time(recording));
  }
  if (parallel::rank() == 0)
    fmt::print("{:<8} {:>10.1f} {:>10.1f} {:>8.4f} {:>8.4f}\n", bench::name(mode), bench::median(off),
               bench::median(on), bench::median_ratio(on, off), bench::quantile(on, 0.1) / bench::quantile(off, 0.1));
}

}  // namespace

int main(int argc, char** argv) {
  Settings s;
  bench::Options options(
      "The training step of the MLP 784-512-512-10 with recording off and on, in turn: medians in microseconds, the "
      "median over rounds of on / off, and the quotient of the 10th percentiles, which a busy machine disturbs least.");
  options.number("--batch-size", &s.batch_size, "rows a step on all devices together", 1);
  options.number("--rounds", &s.rounds, "rounds", 1);
  options.number("--steps", &s.steps, "steps that are timed in a round", 1);
  if (const std::optional<int> code = options.parse(argc, argv)) return *code;
  try {
    if (std::getenv("RANK") == nullptr) {
      fmt::print("{:<8} {:>10} {:>10} {:>8} {:>8}\n", "mode", "off (us)", "on (us)", "ratio", "p10");
      measure(Mode::one, s);
      measure(Mode::dp, s);
      std::fflush(stdout);
    }
    return parallel::spawn(
        [&](int, int) {
          parallel::init_process_group();
          measure(Mode::ddp, s);
          parallel::destroy_process_group();
        },
        {.nprocs = 2});
  } catch (const Error& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
