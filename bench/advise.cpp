#include "advise.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <tandem/parallel/bucket.h>
#include <tandem/tandem.h>

#include "dp_vs_ddp_report.h"
#include "model.h"
#include "prediction.h"
#include "timing.h"
#include "turns.h"

using namespace tandem;

namespace bench {
namespace {

using Group = std::shared_ptr<parallel::ProcessGroup>;

// Phases of one device's or a wrapper's step, in proportion to the mean step: the rare long ones count too.
Phases phases_of_mean(Side& side, int calls) {
  Phases phases;
  const double whole = mean_of(1, [&] { phases = side.phases(calls); }).at("whole") / calls;
  const double scale = whole / phases.at("whole");
  for (auto& entry : phases) entry.second *= scale;
  return phases;
}

// Calls body with the devices and threads of a mode.
template <class Body>
auto in(Mode mode, int devices, const Body& body) {
  enter(mode, devices);
  auto result = body();
  enter(Mode::one, 1);
  return result;
}

// Gradients of as many bytes as the model's, with nothing else to do.
struct Flat : nn::Module {
  explicit Flat(std::int64_t count) { weight = register_parameter("weight", zeros({count})); }
  Tensor forward(const Tensor& x) override { return sum(weight) * x; }
  Tensor weight;
};

// The pieces of a step on the first `devices` ranks, and what they were measured to take.
class Workshop {
 public:
  Workshop(const Problem& problem, int devices, Group group)
      : problem_(problem), n_(devices), group_(std::move(group)), part_((problem.batch_size + n_ - 1) / n_) {
    for (const Tensor& p : make_mlp(problem.layers, problem.width)->parameters()) bytes_.push_back(p.numel() * 4);
    total_ = std::accumulate(bytes_.begin(), bytes_.end(), std::int64_t{0});
  }

  Pieces measure(int rounds, double round_ms) {
    const bool member = group_->rank() >= 0, first = parallel::rank() == 0;
    const Problem whole = problem_, part = with_rows(problem_, part_);
    const Problem tiny{.layers = problem_.layers, .width = 8, .batch_size = 1, .adam = problem_.adam};
    std::vector<Turn> turns;
    auto add = [&](int ranks, std::function<Phases(int)> run) {
      turns.push_back({.run = std::move(run), .ranks = ranks});
      return turns.size() - 1;
    };
    // On rank 0 alone.
    std::optional<Side> one_whole, one_tiny, dp_tiny;
    std::optional<parallel::DataParallel> flat;
    // On all ranks of the group.
    std::optional<Side> one_part, ddp_tiny;
    if (member) one_part.emplace(Mode::one, part, 1, kLearningRate);
    if (member) ddp_tiny.emplace(Mode::ddp, with_rows(tiny, n_), 1, kLearningRate, group_);
    if (member) one_tiny.emplace(Mode::one, tiny, 1, kLearningRate);
    if (first) {
      one_whole.emplace(Mode::one, whole, 1, kLearningRate);
      enter(Mode::dp, n_);
      dp_tiny.emplace(Mode::dp, with_rows(tiny, n_), n_, kLearningRate);
      flat.emplace(std::make_shared<Flat>(total_ / 4));
      enter(Mode::one, 1);
    }
    const auto t_whole = add(1, [&](int calls) { return phases_of_mean(*one_whole, calls); });
    const auto t_part = add(1, [&](int calls) { return phases_of_mean(*one_part, calls); });
    const auto t_tiny = add(1, [&](int calls) { return phases_of_mean(*one_tiny, calls); });
    const auto t_dp_tiny =
        add(1, [&](int calls) { return in(Mode::dp, n_, [&] { return phases_of_mean(*dp_tiny, calls); }); });
    const auto t_flat = add(1, [&](int calls) { return in(Mode::dp, n_, [&] { return sum_flat(*flat, calls); }); });
    const auto t_together = add(n_, [&](int calls) { return in_step(*one_part, calls); });
    const auto t_tiny_together = add(n_, [&](int calls) { return in_step(*one_tiny, calls); });
    const auto t_ddp_tiny = add(n_, [&](int calls) { return phases_of_mean(*ddp_tiny, calls); });
    std::vector<std::pair<std::int64_t, std::size_t>> reductions;
    for (const std::int64_t bytes : {std::int64_t{4} << 10, std::int64_t{256} << 10, std::int64_t{1} << 20, total_}) {
      if (bytes > total_) continue;
      Tensor t = member ? group_->allocate({bytes / 4}, float32) : Tensor();
      reductions.emplace_back(bytes, add(n_, [this, t](int calls) { return all_reduce(t, calls); }));
    }
    Tensor gradients = member ? group_->allocate({total_ / 4}, float32) : Tensor();
    const auto t_both = add(n_, [&](int calls) {
      return mean_of(calls, [&] {
        group_->barrier().wait();
        parallel::Work work = group_->all_reduce(gradients, parallel::ReduceOp::avg);
        one_part->step();
        work.wait();
      });
    });

    take_turns(turns, rounds, round_ms);
    if (!first) return {};
    Pieces pieces{.devices = n_};
    auto computing = [](const Turn& t) { return t.median("forward") + t.median("backward"); };
    pieces.compute[static_cast<double>(part_)] = computing(turns[t_part]);
    pieces.compute[static_cast<double>(problem_.batch_size)] = computing(turns[t_whole]);
    pieces.update = turns[t_whole].median("step");
    const double together = turns[t_together].median("whole");
    pieces.slowdown = std::max(1.0, together / turns[t_part].median("whole"));
    pieces.dp_wrapper = std::max(0.0, turns[t_dp_tiny].median("whole") - turns[t_tiny].median("whole"));
    pieces.dp_sum = std::max(0.0, turns[t_flat].median("reduce") - turns[t_dp_tiny].median("reduce"));
    for (const auto& [bytes, turn] : reductions)
      pieces.all_reduce[static_cast<double>(bytes)] = turns[turn].median("whole");
    pieces.ddp_wrapper = std::max(
        0.0, turns[t_ddp_tiny].median("whole") - turns[t_tiny_together].median("whole") - at(pieces.all_reduce, 4096));
    const double alone = at(pieces.all_reduce, static_cast<double>(total_));
    pieces.hidden_share = std::clamp((together + alone - turns[t_both].median("whole")) / alone, 0.0, 1.0);
    return pieces;
  }

  std::vector<Candidate> candidates() const {
    std::vector<Candidate> all{{.mode = Mode::dp, .devices = n_}};
    for (const double mb : {25.0, 4.0, 1.0, 0.25}) {
      Candidate c{.mode = Mode::ddp, .devices = n_, .bucket_mb = mb, .bucket_bytes = buckets(mb)};
      if (all.back().bucket_bytes != c.bucket_bytes) all.push_back(std::move(c));
    }
    return all;
  }

  std::string describe(const Pieces& p) const {
    const double few = static_cast<double>(part_), many = static_cast<double>(problem_.batch_size);
    const double per_row = n_ == 1 ? 0 : (at(p.compute, many) - at(p.compute, few)) / (many - few);
    return fmt::format(
        "{} devices, in us: forward and backward {:.0f} + {:.2f} a row, as {} rows take {:.0f} and {} rows {:.0f}; "
        "update {:.0f}; all at once {:.2f} times as long.\n"
        "  DP: wrapper {:.0f}, sum of the gradients {:.0f}. DDP ({}): wrapper {:.0f}, all-reduce of {:.2f} MB {:.0f}, "
        "{:.0f} % hidden by computing.\n",
        n_, at(p.compute, many) - per_row * many, per_row, part_, at(p.compute, few), problem_.batch_size,
        at(p.compute, many), p.update, p.slowdown, p.dp_wrapper, p.dp_sum, group_->backend(), p.ddp_wrapper,
        static_cast<double>(total_) / 1e6, at(p.all_reduce, static_cast<double>(total_)), 100 * p.hidden_share);
  }

 private:
  static Problem with_rows(Problem problem, std::int64_t rows) {
    problem.batch_size = rows;
    return problem;
  }

  // The same step on all ranks at once, none of which begins before all have ended the one before.
  Phases in_step(Side& side, int calls) const {
    return mean_of(calls, [&] {
      group_->barrier().wait();
      side.step();
    });
  }

  static Phases sum_flat(parallel::DataParallel& flat, int calls) {
    std::vector<double> times;
    const Tensor x = ones({static_cast<std::int64_t>(flat.devices().size()), 1});
    for (int i = 0; i < calls; ++i) {
      sum(flat(x)).backward();
      times.push_back(flat.phases().reduce * 1e6);
      flat.zero_grad();
    }
    return {{"reduce", std::accumulate(times.begin(), times.end(), 0.0) / calls}};
  }

  // Of data that each rank has just written, as a backward does; the time of the slower rank.
  Phases all_reduce(Tensor t, int calls) const {
    double total = 0;
    for (int i = 0; i < calls; ++i) {
      t.fill_(1);
      group_->barrier().wait();
      total += mean_of(1, [&] {
                 group_->all_reduce(t, parallel::ReduceOp::avg).wait();
                 group_->barrier().wait();
               }).at("whole");
    }
    const double barrier = mean_of(calls, [&] { group_->barrier().wait(); }).at("whole");
    return {{"whole", std::max(0.0, total / calls - barrier)}};
  }

  std::vector<double> buckets(double mb) const {
    std::vector<parallel::BucketItem> items;
    for (auto bytes = bytes_.rbegin(); bytes != bytes_.rend(); ++bytes) items.push_back({.bytes = *bytes});
    const std::int64_t cap = static_cast<std::int64_t>(mb * (1 << 20));
    const std::int64_t caps[] = {std::min<std::int64_t>(1 << 20, cap), cap};
    std::vector<double> sizes;
    for (const auto& bucket : parallel::plan_buckets(items, caps)) {
      sizes.push_back(0);
      for (const std::size_t i : bucket) sizes.back() += static_cast<double>(items[i].bytes);
    }
    return sizes;
  }

  Problem problem_;
  int n_;
  Group group_;
  std::int64_t part_, total_ = 0;
  std::vector<std::int64_t> bytes_;  // of each parameter
};

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

// The records of one batch size and optimizer, on rank 0. Called by all ranks.
nlohmann::json advise_for(const Problem& problem, const std::vector<int>& counts, const std::vector<Group>& groups,
                          const Settings& s) {
  const bool first = parallel::rank() == 0;
  std::vector<Prediction> predictions;
  const auto rows = static_cast<double>(problem.batch_size);
  if (first)
    fmt::print("MLP with {} hidden layer{} of {}, {} rows a step, {}\n", problem.layers, problem.layers == 1 ? "" : "s",
               problem.width, problem.batch_size, problem.adam ? "adam" : "sgd");
  for (std::size_t i = 0; i < counts.size(); ++i) {
    Workshop workshop(problem, counts[i], groups[i]);
    const Pieces pieces = workshop.measure(s.rounds, s.round_ms / 2);
    if (!first) continue;
    fmt::print("{}", workshop.describe(pieces));
    if (predictions.empty()) predictions.push_back(predict(pieces, {}, rows));
    for (const Candidate& c : workshop.candidates()) predictions.push_back(predict(pieces, c, rows));
  }
  // The best of each mode is run. Rank 0 says which they are, by number of devices and size of buckets.
  Tensor chosen = zeros({4}, {.dtype = float64});
  std::vector<std::size_t> run;
  if (first) {
    print_predictions(predictions);
    const std::size_t best = best_of(predictions);
    if (best == 0)
      fmt::print("Stay on one device: by these numbers nothing is faster.\n");
    else
      fmt::print("Use {}: by these numbers {:.2f} times as fast as one device.\n",
                 bench::describe(predictions[best].candidate), predictions.front().step() / predictions[best].step());
    run.push_back(0);
    for (const Mode mode : {Mode::dp, Mode::ddp}) {
      std::vector<Prediction> of_mode;
      std::vector<std::size_t> numbers;
      for (std::size_t i = 0; i < predictions.size(); ++i)
        if (predictions[i].candidate.mode == mode) {
          of_mode.push_back(predictions[i]);
          numbers.push_back(i);
        }
      run.push_back(numbers[best_of(of_mode)]);
    }
    chosen = tensor(
        {static_cast<double>(predictions[run[1]].candidate.devices),
         static_cast<double>(predictions[run[2]].candidate.devices), predictions[run[2]].candidate.bucket_mb, 0.0},
        {.dtype = float64});
  }
  parallel::broadcast(chosen, 0);
  const auto numbers = chosen.to_vector<double>();
  const std::vector<Candidate> candidates{
      {},
      {.mode = Mode::dp, .devices = static_cast<int>(numbers[0])},
      {.mode = Mode::ddp, .devices = static_cast<int>(numbers[1]), .bucket_mb = numbers[2]}};
  const auto group =
      groups[static_cast<std::size_t>(std::ranges::find(counts, candidates[2].devices) - counts.begin())];
  const auto times = run_steps(candidates, problem, {nullptr, nullptr, group}, s.rounds, s.round_ms);
  nlohmann::json records = nlohmann::json::array();
  if (!first) return records;
  for (const Prediction& p : predictions) records.push_back(record_of(p, predictions.front(), problem));
  records[best_of(predictions)]["chosen"] = true;
  fmt::print("{:>5} {:>2} {:>10} {:>22} {:>6} {:>18}\n", "mode", "n", "predicted", "measured [p10, p90]", "error",
             "speed-up, measured");
  for (std::size_t i = 0; i < run.size(); ++i) {
    nlohmann::json& record = records[run[i]];
    const double predicted = predictions[run[i]].step(), measured = median(times[i]);
    record["measured_us"] = measured;
    record["error"] = predicted / measured - 1;
    record["measured_speed_up"] = median_ratio(times[0], times[i]);
    fmt::print(
        "{:>5} {:>2} {:>10.0f} {:>22} {:>5.0f}% {:>8.2f}, {:>8.2f}\n", name(candidates[i].mode), candidates[i].devices,
        predicted, fmt::format("{:.0f} [{:.0f}, {:.0f}]", measured, quantile(times[i], 0.1), quantile(times[i], 0.9)),
        100 * (predicted / measured - 1), predictions.front().step() / predicted, median_ratio(times[0], times[i]));
  }
  std::fflush(stdout);
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
      for (const nlohmann::json& record : advise_for(problem, counts, groups, s)) records.push_back(record);
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
