#include "advise.h"

#include <algorithm>
#include <memory>
#include <numeric>

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

// Empty where this process has no part in it.
std::unique_ptr<Side> side_of(const Candidate& c, Problem problem, const Group& group) {
  const bool ranks = c.mode == Mode::ddp;
  if (ranks ? group->rank() < 0 : parallel::rank() != 0) return nullptr;
  if (ranks) problem.bucket_mb = c.bucket_mb;
  enter(c.mode, c.devices);
  auto side = std::make_unique<Side>(c.mode, problem, c.mode == Mode::dp ? c.devices : 1, kLearningRate, group);
  enter(Mode::one, 1);
  return side;
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

std::string buckets(const Candidate& c) { return c.mode == Mode::ddp ? fmt::format("{} MiB", c.bucket_mb) : ""; }

void print_predictions(const std::vector<Prediction>& predictions) {
  fmt::print("{:>5} {:>2} {:>8} {:>10} {:>8}   {}\n", "mode", "n", "buckets", "predicted", "speed-up", "limited by");
  for (const Prediction& p : predictions)
    fmt::print("{:>5} {:>2} {:>8} {:>10.0f} {:>8.2f}   {}\n", name(p.candidate.mode), p.candidate.devices,
               buckets(p.candidate), p.step(), predictions.front().step() / p.step(),
               what_limits(p, predictions.front()));
}

void print_choice(const Prediction& best, const Prediction& one) {
  if (best.candidate.mode == Mode::one)
    fmt::print("Stay on one device: by these numbers nothing is faster.\n");
  else
    fmt::print("Use {}: by these numbers {:.2f} times as fast as one device.\n", describe(best.candidate),
               one.step() / best.step());
}

// Prints the predictions beside what was measured, and adds that to the records.
void print_results(const std::vector<Prediction>& predictions, const std::vector<const Turn*>& runs, std::size_t chosen,
                   nlohmann::json& records) {
  fmt::print("{:>5} {:>2} {:>8} {:>10} {:>22} {:>6} {:>10} {:>9}\n", "mode", "n", "buckets", "predicted",
             "measured [p10, p90]", "error", "speed-up", "measured");
  const double one = runs.front()->typical("whole");
  std::size_t fastest = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const Prediction& p = predictions[i];
    const std::vector<double>& times = runs[i]->samples.at("whole");
    const double measured = runs[i]->typical("whole"), error = p.step() / measured - 1;
    if (measured < runs[fastest]->typical("whole")) fastest = i;
    records[i].update({{"measured_us", measured}, {"error", error}, {"measured_speed_up", one / measured}});
    fmt::print("{:>5} {:>2} {:>8} {:>10.0f} {:>22} {:>5.0f}% {:>10.2f} {:>9.2f}\n", name(p.candidate.mode),
               p.candidate.devices, buckets(p.candidate), p.step(),
               fmt::format("{:.0f} [{:.0f}, {:.0f}]", measured, quantile(times, 0.1), quantile(times, 0.9)),
               100 * error, predictions.front().step() / p.step(), one / measured);
  }
  if (fastest == chosen)
    fmt::print("Nothing that was run was faster.\n");
  else
    fmt::print("Of what was run {} was {:.1f} % faster.\n", describe(predictions[fastest].candidate),
               100 * (runs[chosen]->typical("whole") / runs[fastest]->typical("whole") - 1));
  std::fflush(stdout);
}

// The records of one batch size and optimizer, on rank 0. Called by all ranks. Pieces and runs take turns, so that a
// load that comes and goes is in both; short turns and many of them meet it often.
nlohmann::json advise_for(const Problem& problem, const std::vector<Group>& groups, const Settings& s) {
  constexpr int kParts = 3;
  std::vector<Turn> turns;
  std::vector<PieceTurns> pieces_of;
  std::vector<std::vector<Candidate>> candidates;  // of each group
  std::vector<std::unique_ptr<Side>> sides;
  std::vector<std::size_t> numbers;  // of the turns that run a candidate
  for (const Group& group : groups) {
    pieces_of.emplace_back(problem, group, turns);
    candidates.push_back(candidates_of(problem, group->size()));
    if (group == groups.front()) candidates.back().insert(candidates.back().begin(), Candidate{});
    for (const Candidate& c : candidates.back()) {
      Side* side = sides.emplace_back(side_of(c, problem, group)).get();
      numbers.push_back(turns.size());
      turns.push_back({.run =
                           [side, c](int calls) {
                             return in(c.mode, c.devices, [&] { return mean_of(calls, [&] { side->step(); }); });
                           },
                       .ranks = c.mode == Mode::ddp ? c.devices : 1});
    }
  }
  take_turns(turns, s.rounds * kParts, s.round_ms / kParts / 2);
  nlohmann::json records = nlohmann::json::array();
  if (parallel::rank() != 0) return records;

  fmt::print("MLP with {} hidden layer{} of {}, {} rows a step, {}\n", problem.layers, problem.layers == 1 ? "" : "s",
             problem.width, problem.batch_size, problem.adam ? "adam" : "sgd");
  std::vector<Prediction> predictions;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const Pieces pieces = pieces_of[g].pieces(turns);
    fmt::print("{}", describe(pieces, groups[g]->backend()));
    for (const Candidate& c : candidates[g])
      predictions.push_back(predict(pieces, c, static_cast<double>(problem.batch_size)));
  }
  print_predictions(predictions);
  const std::size_t best = best_of(predictions);
  print_choice(predictions[best], predictions.front());
  for (const Prediction& p : predictions) records.push_back(record_of(p, predictions.front(), problem));
  records[best]["chosen"] = true;
  std::vector<const Turn*> runs;
  for (const std::size_t i : numbers) runs.push_back(&turns[i]);
  print_results(predictions, runs, best, records);
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
