#include "advise.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include <nlohmann/json.hpp>

#include <tandem/tandem.h>

#include "dp_vs_ddp_report.h"
#include "pieces.h"
#include "timing.h"
#include "turns.h"

using namespace tandem;

namespace bench {
namespace {

using Group = std::shared_ptr<parallel::ProcessGroup>;

// The group of the first n ranks. Every rank calls it.
Group group_of(int n) {
  if (n == parallel::world_size()) return parallel::default_group();
  std::vector<int> ranks(static_cast<std::size_t>(n));
  std::iota(ranks.begin(), ranks.end(), 0);
  return parallel::new_group(ranks);
}

// Microseconds a step of each candidate in each round. Called by all ranks.
std::vector<std::vector<double>> run_steps(const std::vector<Candidate>& candidates, const Problem& problem,
                                           const std::vector<Group>& groups, int rounds, double round_ms) {
  std::vector<std::optional<Side>> sides(candidates.size());
  std::vector<Turn> turns;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& c = candidates[i];
    const bool all = c.mode == Mode::ddp;
    if (all ? groups[i]->rank() >= 0 : parallel::rank() == 0) {
      Problem own = problem;
      own.bucket_mb = all ? c.bucket_mb : own.bucket_mb;
      enter(c.mode, c.devices);
      sides[i].emplace(c.mode, own, c.mode == Mode::dp ? c.devices : 1, kLearningRate, groups[i]);
      enter(Mode::one, 1);
    }
    turns.push_back(
        {.run = [&side = sides[i],
                 c](int calls) { return in(c.mode, c.devices, [&] { return mean_of(calls, [&] { side->step(); }); }); },
         .ranks = all ? c.devices : 1});
  }
  take_turns(turns, rounds, round_ms);
  std::vector<std::vector<double>> times;
  for (Turn& turn : turns) times.push_back(turn.samples["whole"]);
  return times;
}

nlohmann::json record_of(const Prediction& p, const Prediction& one, const Problem& problem) {
  return {{"layers", problem.layers},
          {"width", problem.width},
          {"batch_size", problem.batch_size},
          {"optimizer", problem.adam ? "adam" : "sgd"},
          {"mode", name(p.candidate.mode)},
          {"devices", p.candidate.devices},
          {"bucket_mb", p.candidate.bucket_mb},
          {"predicted_us", p.step()},
          {"predicted_speed_up", one.step() / p.step()},
          {"parts_us",
           {{"compute", p.compute},
            {"waiting", p.waiting},
            {"update", p.update},
            {"exchange", p.exchange},
            {"wrapper", p.wrapper}}},
          {"limited_by", what_limits(p, one)}};
}

void print_predictions(const std::vector<Prediction>& predictions) {
  fmt::print("{:>5} {:>2} {:>7} {:>10} {:>8}   {}\n", "mode", "n", "buckets", "predicted", "speed-up", "limited by");
  for (const Prediction& p : predictions)
    fmt::print("{:>5} {:>2} {:>7} {:>10.0f} {:>8.2f}   {}\n", name(p.candidate.mode), p.candidate.devices,
               p.candidate.mode == Mode::ddp ? fmt::format("{} MiB", p.candidate.bucket_mb) : "", p.step(),
               predictions.front().step() / p.step(), what_limits(p, predictions.front()));
}

// What the pieces predict for one device, and for each candidate; on rank 0. Called by all ranks.
std::vector<Prediction> predictions_for(const Problem& problem, const std::vector<Group>& groups, const Settings& s) {
  const bool first = parallel::rank() == 0;
  const auto rows = static_cast<double>(problem.batch_size);
  if (first)
    fmt::print("MLP with {} hidden layer{} of {}, {} rows a step, {}\n", problem.layers, problem.layers == 1 ? "" : "s",
               problem.width, problem.batch_size, problem.adam ? "adam" : "sgd");
  std::vector<Prediction> predictions;
  for (const Group& group : groups) {
    const Pieces pieces = measure_pieces(problem, group, s.rounds, s.round_ms / 2);
    if (!first) continue;
    fmt::print("{}", describe(pieces, group->backend()));
    if (predictions.empty()) predictions.push_back(predict(pieces, {}, rows));
    for (const Candidate& c : candidates_of(problem, group->size())) predictions.push_back(predict(pieces, c, rows));
  }
  return predictions;
}

void print_choice(const Prediction& best, const Prediction& one) {
  if (best.candidate.mode == Mode::one)
    fmt::print("Stay on one device: by these numbers nothing is faster.\n");
  else
    fmt::print("Use {}: by these numbers {:.2f} times as fast as one device.\n", describe(best.candidate),
               one.step() / best.step());
}

// The numbers of those to run: one device, and the best of each other mode.
std::vector<std::size_t> best_of_modes(const std::vector<Prediction>& predictions) {
  std::vector<std::size_t> best{0};
  for (const Mode mode : {Mode::dp, Mode::ddp}) {
    std::vector<Prediction> of_mode;
    std::vector<std::size_t> numbers;
    for (std::size_t i = 0; i < predictions.size(); ++i) {
      if (predictions[i].candidate.mode != mode) continue;
      of_mode.push_back(predictions[i]);
      numbers.push_back(i);
    }
    best.push_back(numbers[best_of(of_mode)]);
  }
  return best;
}

// Prints the predictions beside what was measured, and adds that to the records.
void print_results(const std::vector<Prediction>& run, const std::vector<std::vector<double>>& times,
                   const std::vector<nlohmann::json*>& records) {
  fmt::print("{:>5} {:>2} {:>10} {:>22} {:>6} {:>10} {:>9}\n", "mode", "n", "predicted", "measured [p10, p90]", "error",
             "speed-up", "measured");
  for (std::size_t i = 0; i < run.size(); ++i) {
    const double predicted = run[i].step(), measured = median(times[i]), error = predicted / measured - 1,
                 speed_up = median_ratio(times[0], times[i]);
    records[i]->update({{"measured_us", measured}, {"error", error}, {"measured_speed_up", speed_up}});
    fmt::print("{:>5} {:>2} {:>10.0f} {:>22} {:>5.0f}% {:>10.2f} {:>9.2f}\n", name(run[i].candidate.mode),
               run[i].candidate.devices, predicted,
               fmt::format("{:.0f} [{:.0f}, {:.0f}]", measured, quantile(times[i], 0.1), quantile(times[i], 0.9)),
               100 * error, run.front().step() / predicted, speed_up);
  }
  std::fflush(stdout);
}

// The records of one batch size and optimizer, on rank 0. Called by all ranks.
nlohmann::json advise_for(const Problem& problem, const std::vector<Group>& groups, const Settings& s) {
  const std::vector<Prediction> predictions = predictions_for(problem, groups, s);
  const bool first = parallel::rank() == 0;
  std::vector<Prediction> run{{}, {.candidate = {.mode = Mode::dp}}, {.candidate = {.mode = Mode::ddp}}};
  nlohmann::json records = nlohmann::json::array();
  std::vector<nlohmann::json*> records_of_run;
  if (first) {
    print_predictions(predictions);
    const std::size_t best = best_of(predictions);
    print_choice(predictions[best], predictions.front());
    for (const Prediction& p : predictions) records.push_back(record_of(p, predictions.front(), problem));
    records[best]["chosen"] = true;
    run.clear();
    for (const std::size_t i : best_of_modes(predictions)) {
      run.push_back(predictions[i]);
      records_of_run.push_back(&records[i]);
    }
  }
  // The other ranks learn what is run.
  Candidate &dp = run[1].candidate, &ddp = run[2].candidate;
  Tensor chosen =
      tensor({static_cast<double>(dp.devices), static_cast<double>(ddp.devices), ddp.bucket_mb}, {.dtype = float64});
  parallel::broadcast(chosen, 0);
  dp.devices = chosen[0].item<int>();
  ddp.devices = chosen[1].item<int>();
  ddp.bucket_mb = chosen[2].item<double>();
  const auto group = std::ranges::find(groups, ddp.devices, [](const Group& g) { return g->size(); });
  const auto times = run_steps({run[0].candidate, dp, ddp}, problem, {nullptr, nullptr, *group}, s.rounds, s.round_ms);
  if (first) print_results(run, times, records_of_run);
  return records;
}

std::vector<Problem> problems_of(const Settings& s) {
  std::vector<Problem> problems;
  for (const std::int64_t batch_size : s.batch_sizes)
    for (const std::string& optimizer : s.optimizers)
      problems.push_back({.layers = s.layers, .width = s.width, .batch_size = batch_size, .adam = optimizer == "adam"});
  return problems;
}

// Calls body on `ranks` processes, with a default group.
int on_ranks(int ranks, const std::string& backend, const std::function<void()>& body) {
  return parallel::spawn(
      [&](int, int) {
        parallel::init_process_group({.backend = backend, .timeout_seconds = 600});
        enter(Mode::one, 1);
        body();
        parallel::destroy_process_group();
      },
      {.nprocs = ranks});
}

}  // namespace

std::vector<int> device_counts(int cores) {
  std::vector<int> counts;
  for (int n = 2; n < cores; n *= 2) counts.push_back(n);
  counts.push_back(std::max(2, cores));
  return counts;
}

int advise(const Settings& s) {
  std::vector<int> counts = s.devices;
  std::ranges::sort(counts);
  for (const int n : counts) check(n > 1, "dp_vs_ddp", "--advise compares one device with more; --devices has {}", n);
  return on_ranks(counts.back(), s.backend, [&] {
    std::vector<Group> groups;
    for (const int n : counts) groups.push_back(group_of(n));
    nlohmann::json records = nlohmann::json::array();
    for (const Problem& problem : problems_of(s))
      for (const nlohmann::json& record : advise_for(problem, groups, s)) records.push_back(record);
    if (parallel::rank() == 0 && !s.json_file.empty()) append_records(s.json_file, records);
  });
}

int guard_cost(const Settings& s) {
  return on_ranks(s.devices.front(), s.backend, [&] {
    for (Problem problem : problems_of(s)) {
      std::vector<std::unique_ptr<Side>> sides;
      std::vector<Turn> turns;
      for (const std::int64_t every : {std::int64_t{0}, s.check_every}) {
        problem.check_every = every;
        sides.push_back(std::make_unique<Side>(Mode::ddp, problem, 1, kLearningRate));
        turns.push_back(
            {.run = [side = sides.back().get()](int calls) { return mean_of(calls, [&] { side->step(); }); },
             .ranks = parallel::world_size(),
             .multiple = static_cast<int>(s.check_every)});
      }
      take_turns(turns, s.rounds, s.round_ms);
      if (parallel::rank() != 0) continue;
      const auto& off = turns[0].samples["whole"];
      const auto& on = turns[1].samples["whole"];
      fmt::print("{} rows: {:.0f} us a step, compared every {} steps {:.0f} us: {:.4f} times as long\n",
                 problem.batch_size, median(off), s.check_every, median(on), median_ratio(on, off));
      std::fflush(stdout);
    }
  });
}

}  // namespace bench
