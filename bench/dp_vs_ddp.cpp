// dp_vs_ddp: the same training step on one device, with DataParallel, and with DistributedDataParallel, in turn within
// one run, and where the time of each goes.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

#include <tandem/tandem.h>
#include <tandem/tensor/io/atomic_file.h>

#include "advise.h"
#include "dp_vs_ddp_report.h"
#include "dp_vs_ddp_sides.h"
#include "options.h"
#include "timing.h"

using namespace tandem;
using bench::enter;
using bench::kLearningRate;
using bench::Mode;
using bench::Settings;
using bench::Side;

namespace {

constexpr int kCheckedSteps = 10;
constexpr double checked_rate(bool adam) { return adam ? 1e-3 : 0.1; }  // in the comparison of losses

// Rank 0 measures all modes and leads the others through those that need them.
enum Order : std::int64_t { kMakeForCheck, kMake, kRun, kLosses, kPhases, kPeak, kTrace, kEnd };

class Conductor {
 public:
  Conductor(const Settings& settings, int devices) : s_(settings), devices_(devices) {}

  // Whether the losses of all modes agree; then the records of one batch size and optimizer.
  nlohmann::json measure(std::int64_t batch_size, const std::string& optimizer) {
    problem_ = {.layers = s_.layers, .width = s_.width, .batch_size = batch_size, .adam = optimizer == "adam"};
    sides_.clear();
    modes_.clear();
    for (const Mode mode : {Mode::one, Mode::threads, Mode::dp, Mode::ddp})
      if (mode == Mode::one || s_.has(mode)) modes_.push_back(mode);
    check_losses();
    std::vector<double> peaks, moved;
    std::vector<bench::Phases> phases;
    for (const Mode mode : modes_) {
      make(mode, kMake, kLearningRate);
      run(sides_.size() - 1, 5);
      peaks.push_back(in(mode, kPeak, [&] { return sides_.back()->peak_bytes(); }));
      moved.push_back(sides_.back()->moved_bytes());
    }
    const std::vector<std::vector<double>> times = time_rounds();
    for (std::size_t i = 0; i < modes_.size(); ++i)
      phases.push_back(in(modes_[i], kPhases, [&] { return sides_[i]->phases(kPhaseSteps); }));
    if (!s_.trace_file.empty()) record_steps();
    nlohmann::json records = nlohmann::json::array();
    for (std::size_t i = 0; i < modes_.size(); ++i) {
      const int n = modes_[i] == Mode::one ? 1 : devices_;
      const double speed_up = bench::median_ratio(times[0], times[i]);
      records.push_back({{"layers", s_.layers},
                         {"width", s_.width},
                         {"batch_size", batch_size},
                         {"optimizer", optimizer},
                         {"mode", bench::name(modes_[i])},
                         {"devices", n},
                         {"median_us", bench::median(times[i])},
                         {"p10_us", bench::quantile(times[i], 0.1)},
                         {"p90_us", bench::quantile(times[i], 0.9)},
                         {"samples_per_s", static_cast<double>(batch_size) / bench::median(times[i]) * 1e6},
                         {"speed_up", speed_up},
                         {"efficiency", speed_up / n},
                         {"peak_bytes", peaks[i]},
                         {"moved_bytes", moved[i]},
                         {"phases_us", phases[i]},
                         {"limited_by", bench::what_limits(modes_[i], n, speed_up, phases[i], phases[0])}});
    }
    return records;
  }

  // What the other ranks do: follow rank 0's orders.
  static void follow(const Settings& settings) {
    std::unique_ptr<Side> side;
    for (;;) {
      Tensor order = zeros({5}, {.dtype = int64});
      parallel::broadcast(order, 0);
      const auto o = order.to_vector<std::int64_t>();
      switch (o[0]) {
        case kMakeForCheck:
        case kMake:
          side.reset();
          side = std::make_unique<Side>(
              Mode::ddp,
              bench::Problem{.layers = settings.layers, .width = settings.width, .batch_size = o[1], .adam = o[2] != 0},
              1, o[0] == kMake ? kLearningRate : checked_rate(o[2] != 0));
          break;
        case kRun:
          for (std::int64_t i = 0; i < o[3]; ++i) side->step();
          break;
        case kLosses:
          (void)side->losses(kCheckedSteps);
          break;
        case kPhases:
          (void)side->phases(kPhaseSteps);
          break;
        case kPeak:
          (void)side->peak_bytes();
          break;
        case kTrace:
          start_trace();
          break;
        default:
          write_trace(settings);
          return;
      }
    }
  }

  void end() {
    give(kEnd);
    write_trace(s_);
  }

 private:
  static constexpr int kPhaseSteps = 51, kTracedSteps = 20;

  void give(Order order, std::int64_t calls = 0) const {
    if (!s_.has(Mode::ddp)) return;
    Tensor t = tensor({static_cast<std::int64_t>(order), problem_.batch_size, static_cast<std::int64_t>(problem_.adam),
                       calls, std::int64_t{0}});
    parallel::broadcast(t, 0);
  }

  // Calls body in the mode's settings; in ddp with the other ranks doing the same.
  template <class Body>
  std::invoke_result_t<const Body&> in(Mode mode, Order order, const Body& body, std::int64_t calls = 0) const {
    enter(mode, devices_);
    if (mode == Mode::ddp) give(order, calls);
    return body();
  }

  void make(Mode mode, Order order, double lr) {
    sides_.push_back(
        in(mode, order, [&] { return std::make_unique<Side>(mode, problem_, mode == Mode::dp ? devices_ : 1, lr); }));
  }

  void run(std::size_t side, int calls) const {
    in(
        modes_[side], kRun,
        [&] {
          for (int i = 0; i < calls; ++i) sides_[side]->step();
          return 0;
        },
        calls);
  }

  // The file has what was recorded last: the steps of all modes at the last size.
  static void start_trace() {
    trace::stop();
    trace::start();
  }
  static void write_trace(const Settings& settings) {
    if (!settings.trace_file.empty()) parallel::write_trace(settings.trace_file);
  }
  void record_steps() const {
    give(kTrace);
    start_trace();
    for (std::size_t i = 0; i < sides_.size(); ++i) {
      const trace::Span span(bench::name(modes_[i]));
      run(i, kTracedSteps);
    }
    trace::stop();
  }

  void check_losses() {
    std::vector<double> expected;
    for (const Mode mode : modes_) {
      make(mode, kMakeForCheck, checked_rate(problem_.adam));
      const std::vector<double> got = in(mode, kLosses, [&] { return sides_.back()->losses(kCheckedSteps); });
      if (expected.empty()) expected = got;
      for (std::size_t i = 0; i < got.size(); ++i)
        check(std::abs(got[i] - expected[i]) <= 1e-3 * std::abs(expected[i]), "dp_vs_ddp",
              "the loss of mode {} at step {} is {}, but {} on one device; a comparison of their speed would mean "
              "nothing",
              bench::name(mode), i, got[i], expected[i]);
    }
    sides_.clear();
  }

  // Microseconds a step of each side in each round.
  std::vector<std::vector<double>> time_rounds() const {
    using Clock = std::chrono::steady_clock;
    auto time = [&](std::size_t side, int calls) {
      run(side, std::max(1, calls / 8));  // brings its data back into the caches, and the ranks together
      const auto start = Clock::now();
      run(side, calls);
      return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / calls;
    };
    std::vector<int> calls;
    for (std::size_t i = 0; i < sides_.size(); ++i) {
      time(i, 20);
      calls.push_back(std::max(3, static_cast<int>(s_.round_ms * 1000 / time(i, 10))));
    }
    std::vector<std::vector<double>> times(sides_.size());
    for (int round = 0; round < s_.rounds; ++round)
      for (std::size_t k = 0; k < sides_.size(); ++k) {
        const std::size_t i = (k + static_cast<std::size_t>(round)) % sides_.size();
        times[i].push_back(time(i, calls[i]));
      }
    return times;
  }

  const Settings& s_;
  int devices_;
  bench::Problem problem_;
  std::vector<Mode> modes_;
  std::vector<std::unique_ptr<Side>> sides_;
};

// All records for one number of devices; in a process that leads the ranks of ddp if that is measured.
void measure_all(const Settings& s, int devices) {
  Conductor conductor(s, devices);
  nlohmann::json records = nlohmann::json::array();
  for (const std::int64_t batch_size : s.batch_sizes)
    for (const std::string& optimizer : s.optimizers)
      for (const nlohmann::json& record : conductor.measure(batch_size, optimizer)) {
        if (!s.has(bench::Mode::one) && record["mode"] == "one") continue;
        bench::print_row(record);
        records.push_back(record);
      }
  conductor.end();
  // Each number of devices is measured by processes of its own; they meet in the file.
  if (!s.json_file.empty()) bench::append_records(s.json_file, records);
}

int run_benchmark(const Settings& s) {
  if (std::getenv("RANK") == nullptr) bench::print_header(s.layers, s.width);
  for (const int devices : s.devices) {
    if (!s.has(Mode::ddp)) {
      measure_all(s, devices);
      continue;
    }
    const int code = parallel::spawn(
        [&](int rank, int) {
          parallel::init_process_group({.backend = s.backend, .timeout_seconds = 600});
          enter(Mode::ddp, 1);
          if (rank == 0)
            measure_all(s, devices);
          else
            Conductor::follow(s);
          parallel::destroy_process_group();
        },
        {.nprocs = devices});
    if (code != 0) return code;
  }
  return 0;
}

// Options that would be ignored are mistakes.
void check_together(const bench::Options& options, const Settings& s) {
  const auto given = [&](const char* option) { return options.given(option); };
  const auto refuse = [&](const char* option, const std::string& why) { options.refuse(option, why); };
  for (const char* only : {"--advise", "--check-every"}) {
    if (!given(only)) continue;
    for (const char* other : {"--modes", "--trace"})
      if (given(other)) refuse(other, fmt::format("is for a run without {}", only));
  }
  if (given("--check-every")) {
    if (given("--advise")) refuse("--check-every", "is for a run without --advise");
    if (given("--json")) refuse("--json", "is for a run without --check-every");
    if (s.devices.size() > 1) refuse("--devices", "takes one number with --check-every");
  }
  if (given("--trace") && s.devices.size() > 1)
    refuse("--devices", "takes one number with --trace: a file holds one run");
  if (given("--backend") && !s.has(Mode::ddp)) refuse("--backend", "is for the mode ddp; add it to --modes");
  std::vector<int> counts = s.devices;
  std::ranges::sort(counts);
  if (std::ranges::adjacent_find(counts) != counts.end()) refuse("--devices", "has a number twice");
  namespace fs = std::filesystem;
  if (given("--trace") && given("--json") &&
      fs::weakly_canonical(fs::absolute(s.json_file)) == fs::weakly_canonical(fs::absolute(s.trace_file)))
    refuse("--trace", "names the file of --json; give another");
}

}  // namespace

int main(int argc, char** argv) {
  Settings s;
  bool advise = false;
  const int cores = num_threads();
  bench::Options options(
      "The training step of a multilayer perceptron on one device (1 thread), with DataParallel on n virtual CPU "
      "devices, "
      "and with DistributedDataParallel over n processes, one thread each, interleaved in one run. First checks that "
      "all "
      "modes have the same losses. Times are medians over rounds, with the 10th and 90th percentile; 'speed-up' is the "
      "median over rounds of one device / mode.");
  options.number("--batch-size", &s.batch_sizes, "rows a step on all devices together, a comma-separated list", 1);
  options.word("--optimizer", &s.optimizers, "sgd, adam", {"sgd", "adam"});
  options.number("--devices", &s.devices, "numbers of devices and processes", 1, 64);
  options.word("--modes", &s.modes, "one, threads (one device with n threads), dp, ddp",
               {"one", "threads", "dp", "ddp"});
  options.number("--layers", &s.layers, "hidden layers", 0, 1000);
  options.number("--width", &s.width, "width of the hidden layers", 1);
  options.word("--backend", &s.backend, "process group of ddp: shm, gloo (default: the best)");
  options.flag(
      "--advise", &advise,
      "measure the pieces of a step on one device and between devices, predict from them the step of each mode, "
      "number of devices (default: up to the cores) and bucket size, and compare with runs of them, in turn");
  options.number("--check-every", &s.check_every,
                 "only measure what comparing the parameters of ddp at every so many steps costs", 1, 1000);
  options.number("--rounds", &s.rounds, "interleaved rounds", 1);
  options.word("--json", &s.json_file, "write the records to this file");
  options.word("--trace", &s.trace_file, "write a timeline of some steps of each mode, at the last size, to this file");
  if (const std::optional<int> code = options.parse(argc, argv, [&] { check_together(options, s); })) return *code;
  if (advise && !options.given("--devices")) s.devices = bench::device_counts(cores);
  try {
    const bool is_rank = std::getenv("RANK") != nullptr;
    if (!is_rank && !s.json_file.empty() && !bench::write_json(s.json_file, "[]")) return 1;
    if (!is_rank && !s.trace_file.empty()) const AtomicFile writable(s.trace_file, "dp_vs_ddp");
    return advise ? bench::advise(s) : s.check_every > 0 ? bench::guard_cost(s) : run_benchmark(s);
  } catch (const Error& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
