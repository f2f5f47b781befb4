#include "pieces.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include <tandem/parallel/bucket.h>
#include <tandem/tandem.h>

#include "model.h"
#include "turns.h"

using namespace tandem;

namespace bench {
namespace {

using Group = std::shared_ptr<parallel::ProcessGroup>;

Problem with_rows(Problem problem, std::int64_t rows) {
  problem.batch_size = rows;
  return problem;
}

// Of the gradients, in the order of registration.
std::vector<std::int64_t> bytes_of_parameters(const Problem& problem) {
  std::vector<std::int64_t> bytes;
  for (const Tensor& p : make_mlp(problem.layers, problem.width)->parameters()) bytes.push_back(p.numel() * 4);
  return bytes;
}

// Phases of a step, in proportion to the mean step: the rare long ones count too.
Phases phases_of_mean(Side& side, int calls) {
  Phases phases;
  const double whole = mean_of(1, [&] { phases = side.phases(calls); }).at("whole") / calls;
  const double scale = whole / phases.at("whole");
  for (auto& entry : phases) entry.second *= scale;
  return phases;
}

// Gradients of as many bytes as the model's, with nothing else to do.
struct Flat : nn::Module {
  explicit Flat(std::int64_t count) { weight = register_parameter("weight", zeros({count})); }
  Tensor forward(const Tensor& x) override { return sum(weight) * x; }
  Tensor weight;
};

Phases sum_of_gradients(parallel::DataParallel& flat, int calls) {
  double total = 0;
  const Tensor x = ones({static_cast<std::int64_t>(flat.devices().size()), 1});
  for (int i = 0; i < calls; ++i) {
    sum(flat(x)).backward();
    total += flat.phases().reduce * 1e6;
    flat.zero_grad();
  }
  return {{"reduce", total / calls}};
}

// The same step on all ranks at once, none of which begins before all have ended the one before.
Phases in_step(parallel::ProcessGroup& group, Side& side, int calls) {
  return mean_of(calls, [&] {
    group.barrier().wait();
    side.step();
  });
}

// Of data that each rank has just written, as a backward does; until the slowest rank has it.
Phases all_reduce(parallel::ProcessGroup& group, Tensor t, int calls) {
  double total = 0;
  for (int i = 0; i < calls; ++i) {
    t.fill_(1);
    group.barrier().wait();
    const Phases reduced = mean_of(1, [&] {
      group.all_reduce(t, parallel::ReduceOp::avg).wait();
      group.barrier().wait();
    });
    total += reduced.at("whole");
  }
  const double barrier = mean_of(calls, [&] { group.barrier().wait(); }).at("whole");
  return {{"whole", std::max(0.0, total / calls - barrier)}};
}

// An all-reduce that is under way while the ranks compute a step.
Phases both_at_once(parallel::ProcessGroup& group, Tensor gradients, Side& side, int calls) {
  return mean_of(calls, [&] {
    group.barrier().wait();
    parallel::Work work = group.all_reduce(gradients, parallel::ReduceOp::avg);
    side.step();
    work.wait();
  });
}

}  // namespace

Pieces measure_pieces(const Problem& problem, const Group& group, int rounds, double round_ms) {
  const int n = group->size();
  const bool member = group->rank() >= 0, first = parallel::rank() == 0;
  const std::int64_t part_rows = (problem.batch_size + n - 1) / n;
  const std::vector<std::int64_t> bytes = bytes_of_parameters(problem);
  const std::int64_t total = std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
  const Problem tiny{.layers = problem.layers, .width = 8, .batch_size = 1, .adam = problem.adam};

  std::optional<Side> whole, part, one_tiny, dp_tiny, ddp_tiny;
  std::optional<parallel::DataParallel> flat;
  if (member) {
    part.emplace(Mode::one, with_rows(problem, part_rows), 1, kLearningRate);
    one_tiny.emplace(Mode::one, tiny, 1, kLearningRate);
    ddp_tiny.emplace(Mode::ddp, with_rows(tiny, n), 1, kLearningRate, group);
  }
  if (first) {
    whole.emplace(Mode::one, problem, 1, kLearningRate);
    enter(Mode::dp, n);
    dp_tiny.emplace(Mode::dp, with_rows(tiny, n), n, kLearningRate);
    flat.emplace(std::make_shared<Flat>(total / 4));
    enter(Mode::one, 1);
  }
  auto memory = [&](std::int64_t size) { return member ? group->allocate({size / 4}, float32) : Tensor(); };
  const Tensor gradients = memory(total);

  enum { kWhole, kPart, kTiny, kDpTiny, kFlat, kTogether, kTinyTogether, kDdpTiny, kBoth, kAllReduce };
  std::vector<Turn> turns{
      {.run = [&](int calls) { return phases_of_mean(*whole, calls); }},
      {.run = [&](int calls) { return phases_of_mean(*part, calls); }},
      {.run = [&](int calls) { return phases_of_mean(*one_tiny, calls); }},
      {.run = [&](int calls) { return in(Mode::dp, n, [&] { return phases_of_mean(*dp_tiny, calls); }); }},
      {.run = [&](int calls) { return in(Mode::dp, n, [&] { return sum_of_gradients(*flat, calls); }); }},
      {.run = [&](int calls) { return in_step(*group, *part, calls); }, .ranks = n},
      {.run = [&](int calls) { return in_step(*group, *one_tiny, calls); }, .ranks = n},
      {.run = [&](int calls) { return phases_of_mean(*ddp_tiny, calls); }, .ranks = n},
      {.run = [&](int calls) { return both_at_once(*group, gradients, *part, calls); }, .ranks = n}};
  std::vector<std::int64_t> sizes{4 << 10, 256 << 10, 1 << 20};
  std::erase_if(sizes, [&](std::int64_t size) { return size >= total; });
  sizes.push_back(total);
  for (const std::int64_t size : sizes)
    turns.push_back(
        {.run = [&group, t = memory(size)](int calls) { return all_reduce(*group, t, calls); }, .ranks = n});
  take_turns(turns, rounds, round_ms);
  if (!first) return {};

  auto computing = [&](int turn) {
    const Turn& t = turns[static_cast<std::size_t>(turn)];
    return t.median("forward") + t.median("backward");
  };
  const double together = turns[kTogether].median("whole"), tiny_alone = turns[kTiny].median("whole");
  Pieces pieces{.devices = n};
  pieces.compute = {{static_cast<double>(part_rows), computing(kPart)},
                    {static_cast<double>(problem.batch_size), computing(kWhole)}};
  pieces.update = turns[kWhole].median("step");
  pieces.slowdown = std::max(1.0, together / turns[kPart].median("whole"));
  pieces.dp_wrapper = std::max(0.0, turns[kDpTiny].median("whole") - tiny_alone);
  pieces.dp_sum = std::max(0.0, turns[kFlat].median("reduce") - turns[kDpTiny].median("reduce"));
  for (std::size_t i = 0; i < sizes.size(); ++i)
    pieces.all_reduce[static_cast<double>(sizes[i])] = turns[kAllReduce + i].median("whole");
  pieces.ddp_wrapper = std::max(
      0.0, turns[kDdpTiny].median("whole") - turns[kTinyTogether].median("whole") - pieces.all_reduce.begin()->second);
  const double alone = pieces.all_reduce.rbegin()->second;
  pieces.hidden_share = std::clamp((together + alone - turns[kBoth].median("whole")) / alone, 0.0, 1.0);
  return pieces;
}

std::vector<Candidate> candidates_of(const Problem& problem, int devices) {
  const std::vector<std::int64_t> bytes = bytes_of_parameters(problem);
  std::vector<parallel::BucketItem> items;
  for (auto size = bytes.rbegin(); size != bytes.rend(); ++size) items.push_back({.bytes = *size});
  std::vector<Candidate> all{{.mode = Mode::dp, .devices = devices}};
  for (const double mb : {25.0, 4.0, 1.0, 0.25}) {
    const auto cap = static_cast<std::int64_t>(mb * (1 << 20));
    const std::int64_t caps[] = {std::min<std::int64_t>(1 << 20, cap), cap};
    Candidate c{.mode = Mode::ddp, .devices = devices, .bucket_mb = mb};
    for (const auto& bucket : parallel::plan_buckets(items, caps)) {
      c.bucket_bytes.push_back(0);
      for (const std::size_t i : bucket) c.bucket_bytes.back() += static_cast<double>(items[i].bytes);
    }
    if (all.back().bucket_bytes != c.bucket_bytes) all.push_back(std::move(c));
  }
  return all;
}

std::string describe(const Pieces& p, const std::string& backend) {
  const auto [few, quick] = *p.compute.begin();
  const auto [many, slow] = *p.compute.rbegin();
  const double per_row = many > few ? (slow - quick) / (many - few) : 0;
  const auto [bytes, reduced] = *p.all_reduce.rbegin();
  return fmt::format(
      "{} devices, in us: forward and backward {:.0f} for {} rows and {:.0f} for {}, which is {:.0f} and {:.2f} a row; "
      "update {:.0f}; all at once {:.2f} times as long.\n"
      "  DP: wrapper {:.0f}, sum of the gradients {:.0f}. DDP ({}): wrapper {:.0f}, all-reduce of {:.2f} MB {:.0f}, of "
      "which computing hides {:.0f} %.\n",
      p.devices, quick, few, slow, many, slow - per_row * many, per_row, p.update, p.slowdown, p.dp_wrapper, p.dp_sum,
      backend, p.ddp_wrapper, bytes / 1e6, reduced, 100 * p.hidden_share);
}

}  // namespace bench
