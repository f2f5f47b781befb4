#include "pieces.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include <tandem/parallel/bucket.h>
#include <tandem/parallel/on_device.h>
#include <tandem/tandem.h>

#include "model.h"
#include "timing.h"
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

// The mean step on one device, and the update's share of it: the rare long ones count too.
Phases step_and_update(Side& side, int calls) {
  Phases phases;
  const double whole = mean_of(1, [&] { phases = side.phases(calls); }).at("whole") / calls;
  const double parts = phases.at("forward") + phases.at("backward") + phases.at("step");
  return {{"whole", whole}, {"step", phases.at("step") * whole / parts}};
}

// The mean step of DataParallel, and the median of its sum of gradients.
Phases step_and_sum(Side& side, int calls) {
  Phases phases;
  const double whole = mean_of(1, [&] { phases = side.phases(calls); }).at("whole") / calls;
  return {{"whole", whole}, {"reduce", phases.at("reduce")}};
}

// The computing of DataParallel without its wrapper: a model on each device, all with the memory of the first one's
// parameters.
class OnDevices {
 public:
  OnDevices(const Problem& problem, int count) {
    for (int i = 0; i < count; ++i) {
      const Device device(DeviceType::cpu, i);
      Net& net = nets_.emplace_back();
      net.model = make_mlp(problem.layers, problem.width);
      net.model->to(device);
      const std::vector<Tensor> own = net.model->parameters(), shared = nets_.front().model->parameters();
      for (std::size_t k = 0; i > 0 && k < own.size(); ++k) {
        Tensor parameter = own[k];
        parameter.set_data(parallel::on_device(shared[k].detach(), device));
      }
      net.x = rand({problem.batch_size, 784}).to(device);
      net.y = randint(0, 10, {problem.batch_size}).to(device);
      devices_.push_back(device);
    }
  }
  void forward_and_backward() {
    run_on_devices(devices_, [&](int i) {
      Net& net = nets_[static_cast<std::size_t>(i)];
      nn::CrossEntropyLoss()((*net.model)(net.x), net.y).backward();
      net.model->zero_grad();
    });
  }

 private:
  struct Net {
    std::shared_ptr<nn::SequentialImpl> model;
    Tensor x, y;
  };
  std::vector<Net> nets_;
  std::vector<Device> devices_;
};

// Gradients of as many bytes as the model's, with nothing else to do.
struct Flat : nn::Module {
  explicit Flat(std::int64_t count) { weight = register_parameter("weight", zeros({count})); }
  Tensor forward(const Tensor& x) override { return sum(weight) * x; }
  Tensor weight;
};

Phases sum_of_gradients(parallel::DataParallel& flat, int calls) {
  std::vector<double> sums;
  const Tensor x = ones({static_cast<std::int64_t>(flat.devices().size()), 1});
  for (int i = 0; i < calls; ++i) {
    sum(flat(x)).backward();
    sums.push_back(flat.phases().reduce * 1e6);
    flat.zero_grad();
  }
  return {{"reduce", median(sums)}};
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

struct PieceTurns::State {
  Group group;
  std::int64_t rows = 0, part_rows = 0;
  std::optional<Side> whole, part, one_tiny, dp_tiny, ddp_tiny;
  std::optional<parallel::DataParallel> flat;
  std::optional<OnDevices> on_devices, tiny_on_devices;
  std::vector<std::int64_t> sizes;  // of all-reduces
  std::size_t begin = 0;            // of the turns

  // The turns, in this order. Those of the all-reduces are followed by that of an all-reduce beside computing.
  enum Number : std::size_t {
    kWhole,
    kPart,
    kTiny,
    kDpTiny,
    kFlat,
    kOnDevices,
    kTinyOnDevices,
    kTogether,
    kTinyTogether,
    kDdpTiny,
    kAllReduce
  };
};

PieceTurns::PieceTurns(const Problem& problem, const Group& group, std::vector<Turn>& turns)
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  const int n = group->size();
  const bool member = group->rank() >= 0, first = parallel::rank() == 0;
  s.group = group;
  s.rows = problem.batch_size;
  s.part_rows = (problem.batch_size + n - 1) / n;
  const std::vector<std::int64_t> bytes = bytes_of_parameters(problem);
  const std::int64_t total = std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
  const Problem tiny{.layers = problem.layers, .width = 8, .batch_size = 1, .adam = problem.adam};

  if (member) {
    s.part.emplace(Mode::one, with_rows(problem, s.part_rows), 1, kLearningRate);
    s.one_tiny.emplace(Mode::one, tiny, 1, kLearningRate);
    s.ddp_tiny.emplace(Mode::ddp, with_rows(tiny, n), 1, kLearningRate, group);
  }
  if (first) {
    s.whole.emplace(Mode::one, problem, 1, kLearningRate);
    enter(Mode::dp, n);
    s.dp_tiny.emplace(Mode::dp, with_rows(tiny, n), n, kLearningRate);
    s.flat.emplace(std::make_shared<Flat>(total / 4));
    s.on_devices.emplace(with_rows(problem, s.part_rows), n);
    s.tiny_on_devices.emplace(tiny, n);
    enter(Mode::one, 1);
  }
  auto memory = [&](std::int64_t size) { return member ? group->allocate({size / 4}, float32) : Tensor(); };

  s.begin = turns.size();
  const std::vector<Turn> of_steps{
      {.run = [&s](int calls) { return step_and_update(*s.whole, calls); }},
      {.run = [&s](int calls) { return step_and_update(*s.part, calls); }},
      {.run = [&s](int calls) { return step_and_update(*s.one_tiny, calls); }},
      {.run = [&s, n](int calls) { return in(Mode::dp, n, [&] { return step_and_sum(*s.dp_tiny, calls); }); }},
      {.run = [&s, n](int calls) { return in(Mode::dp, n, [&] { return sum_of_gradients(*s.flat, calls); }); }},
      {.run =
           [&s, n](int calls) {
             return in(Mode::dp, n, [&] { return mean_of(calls, [&] { s.on_devices->forward_and_backward(); }); });
           }},
      {.run =
           [&s, n](int calls) {
             return in(Mode::dp, n, [&] { return mean_of(calls, [&] { s.tiny_on_devices->forward_and_backward(); }); });
           }},
      {.run = [&s](int calls) { return in_step(*s.group, *s.part, calls); }, .ranks = n},
      {.run = [&s](int calls) { return in_step(*s.group, *s.one_tiny, calls); }, .ranks = n},
      {.run = [&s](int calls) { return mean_of(calls, [&] { s.ddp_tiny->step(); }); }, .ranks = n}};
  turns.insert(turns.end(), of_steps.begin(), of_steps.end());
  s.sizes = {4 << 10, 256 << 10, 1 << 20};
  std::erase_if(s.sizes, [&](std::int64_t size) { return size >= total; });
  s.sizes.push_back(total);
  for (const std::int64_t size : s.sizes)
    turns.push_back({.run = [&s, t = memory(size)](int calls) { return all_reduce(*s.group, t, calls); }, .ranks = n});
  if (works_beside(group->backend()))
    turns.push_back(
        {.run = [&s, t = memory(total)](int calls) { return both_at_once(*s.group, t, *s.part, calls); }, .ranks = n});
}

PieceTurns::~PieceTurns() = default;
PieceTurns::PieceTurns(PieceTurns&&) noexcept = default;

Pieces PieceTurns::pieces(const std::vector<Turn>& turns) const {
  const State& s = *state_;
  using enum State::Number;
  auto time = [&](std::size_t turn, const char* what) { return turns[s.begin + turn].typical(what); };
  auto computing = [&](std::size_t turn) { return time(turn, "whole") - time(turn, "step"); };
  Pieces pieces{.devices = s.group->size()};
  pieces.compute = {{static_cast<double>(s.part_rows), computing(kPart)},
                    {static_cast<double>(s.rows), computing(kWhole)}};
  pieces.update = time(kWhole, "step");
  pieces.dp_slowdown = std::max(1.0, time(kOnDevices, "whole") / computing(kPart));
  pieces.ddp_slowdown = std::max(1.0, time(kTogether, "whole") / time(kPart, "whole"));
  pieces.dp_wrapper = std::max(0.0, time(kDpTiny, "whole") - time(kTinyOnDevices, "whole") - time(kTiny, "step"));
  pieces.dp_sum = std::max(0.0, time(kFlat, "reduce") - time(kDpTiny, "reduce"));
  for (std::size_t i = 0; i < s.sizes.size(); ++i)
    pieces.all_reduce[static_cast<double>(s.sizes[i])] = time(kAllReduce + i, "whole");
  pieces.ddp_wrapper =
      std::max(0.0, time(kDdpTiny, "whole") - time(kTinyTogether, "whole") - pieces.all_reduce.begin()->second);
  const double alone = pieces.all_reduce.rbegin()->second;
  if (works_beside(s.group->backend()))
    pieces.hidden_share =
        std::clamp((time(kTogether, "whole") + alone - time(kAllReduce + s.sizes.size(), "whole")) / alone, 0.0, 1.0);
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
  const std::string hidden = works_beside(backend)
                                 ? fmt::format(", of which computing hides {:.0f} %", 100 * p.hidden_share)
                                 : ", which computing cannot hide";
  return fmt::format(
      "{} devices, in us: forward and backward {:.0f} for {} rows and {:.0f} for {}, which is {:.0f} and {:.2f} a row; "
      "update {:.0f}.\n"
      "  DP: all devices at once {:.2f} times as long, wrapper {:.0f}, sum of the gradients {:.0f}.\n"
      "  DDP ({}): all ranks at once {:.2f} times as long, wrapper {:.0f}, all-reduce of {:.2f} MB {:.0f}{}.\n",
      p.devices, quick, few, slow, many, slow - per_row * many, per_row, p.update, p.dp_slowdown, p.dp_wrapper,
      p.dp_sum, backend, p.ddp_slowdown, p.ddp_wrapper, bytes / 1e6, reduced, hidden);
}

}  // namespace bench
