#include "dp_vs_ddp_sides.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "model.h"
#include "timing.h"

using namespace tandem;

namespace bench {
namespace {

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

std::int64_t memory_in_use(int devices) {
  std::size_t most = 0;
  for (int i = 0; i < devices; ++i) most = std::max(most, memory_stats(Device(DeviceType::cpu, i)).in_use);
  return static_cast<std::int64_t>(most);
}

}  // namespace

const char* name(Mode mode) {
  constexpr const char* kNames[] = {"one", "threads", "dp", "ddp"};
  return kNames[static_cast<int>(mode)];
}

void enter(Mode mode, int devices) {
  set_num_threads(mode == Mode::dp || mode == Mode::threads ? devices : 1);
  set_cpu_device_count(mode == Mode::dp ? devices : 1);
}

bool Settings::has(Mode mode) const { return std::find(modes.begin(), modes.end(), name(mode)) != modes.end(); }

struct Side::State {
  Mode mode;
  int devices;
  std::int64_t memory_before;
  std::shared_ptr<nn::SequentialImpl> net;
  std::optional<parallel::DataParallel> dp;
  std::optional<parallel::DistributedDataParallel> ddp;
  std::shared_ptr<parallel::ProcessGroup> group;
  std::unique_ptr<optim::Optimizer> optimizer;
  nn::CrossEntropyLoss loss_fn;
  Tensor x, y;

  Tensor loss() {
    if (dp) return dp->loss(loss_fn, x, y);
    if (ddp) return ddp->loss(loss_fn, x, y);
    const trace::Span span("forward");
    return loss_fn((*net)(x), y);
  }
  double bytes_of_buckets() const {
    double bytes = 0;
    for (const auto& bucket : ddp->logging_data().buckets) bytes += static_cast<double>(bucket.bytes);
    return bytes;
  }
  void finish() {
    optimizer->step();
    optimizer->zero_grad();
  }
};

Side::Side(Mode mode, const Problem& problem, int devices, double lr, std::shared_ptr<parallel::ProcessGroup> group)
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.mode = mode;
  s.devices = devices;
  s.memory_before = memory_in_use(devices);
  for (int i = 0; i < devices; ++i) reset_peak_memory(Device(DeviceType::cpu, i));
  manual_seed(0);
  s.net = make_mlp(problem.layers, problem.width);
  s.x = rand({problem.batch_size, 784});
  s.y = randint(0, 10, {problem.batch_size});
  if (mode == Mode::dp) s.dp.emplace(s.net);
  if (mode == Mode::ddp) {
    s.group = group ? std::move(group) : parallel::default_group();
    const std::int64_t rank = s.group->rank(), ranks = s.group->size();
    const std::int64_t begin = problem.batch_size * rank / ranks, end = problem.batch_size * (rank + 1) / ranks;
    s.x = s.x.slice(0, begin, end).clone();
    s.y = s.y.slice(0, begin, end).clone();
    s.ddp.emplace(s.net, parallel::DistributedDataParallelOptions{.process_group = s.group,
                                                                  .bucket_cap_mb = problem.bucket_mb,
                                                                  .first_bucket_mb = std::min(1.0, problem.bucket_mb),
                                                                  .check_every = problem.check_every});
  }
  s.optimizer = make_optimizer(problem.adam, s.net->parameters(), lr);
}

Side::~Side() = default;

void Side::step() {
  const trace::Span span("step");
  state_->loss().backward();
  state_->finish();
}

std::vector<double> Side::losses(int count) {
  std::vector<double> values;
  for (int i = 0; i < count; ++i) {
    const Tensor loss = state_->loss();
    loss.backward();
    state_->finish();
    Tensor value = loss.detach().to(float64);
    if (state_->ddp) parallel::all_reduce(value, {.op = parallel::ReduceOp::avg, .group = state_->group});
    values.push_back(value.item<double>());
  }
  return values;
}

Phases Side::phases(int count) {
  State& s = *state_;
  std::map<std::string, std::vector<double>> samples;
  for (int i = 0; i < count; ++i) {
    auto add = [&](const char* phase, double seconds) { samples[phase].push_back(seconds * 1e6); };
    const auto start = Clock::now();
    const Tensor loss = s.loss();
    const double forward = microseconds_since(start);
    loss.backward();
    const double both = microseconds_since(start);
    s.finish();
    const double whole = microseconds_since(start);
    samples["step"].push_back(whole - both);
    samples["whole"].push_back(whole);
    if (s.dp) {
      const parallel::Phases p = s.dp->phases();
      add("scatter", p.scatter);
      add("replicate", p.replicate);
      add("forward", p.forward);
      add("gather", p.gather);
      add("loss", p.loss);
      add("backward", p.backward);
      add("reduce", p.reduce);
    } else if (s.ddp) {
      const parallel::LoggingData d = s.ddp->logging_data();
      samples["forward"].push_back(forward);
      add("backward", d.backward);
      add("communication", d.communication);
      add("overlap", d.overlap);
      add("wait", d.exposed);
    } else {
      samples["forward"].push_back(forward);
      samples["backward"].push_back(both - forward);
    }
  }
  Phases result;
  for (const auto& [phase, values] : samples) result[phase] = median(values);
  if (s.ddp) {  // the mean over the ranks
    std::vector<double> values;
    for (const auto& entry : result) values.push_back(entry.second);
    Tensor t = tensor(values, {.dtype = float64});
    parallel::all_reduce(t, {.op = parallel::ReduceOp::avg, .group = s.group});
    std::size_t i = 0;
    for (auto& entry : result) entry.second = t[static_cast<std::int64_t>(i++)].item<double>();
  }
  return result;
}

double Side::peak_bytes() const {
  const State& s = *state_;
  std::size_t peak = 0;
  for (int i = 0; i < s.devices; ++i) peak = std::max(peak, memory_stats(Device(DeviceType::cpu, i)).peak);
  double bytes = static_cast<double>(peak) - static_cast<double>(s.memory_before);
  if (!s.ddp) return bytes;
  bytes += s.bytes_of_buckets();  // they lie in the group's memory
  Tensor most = full({1}, bytes, {.dtype = float64});
  parallel::all_reduce(most, {.op = parallel::ReduceOp::max, .group = s.group});
  return most.item<double>();
}

double Side::moved_bytes() const {
  const State& s = *state_;
  if (s.dp) return static_cast<double>(s.dp->phases().bytes_through_device_0);
  if (!s.ddp) return 0;
  return s.bytes_of_buckets() * 2 * (s.group->size() - 1) / s.group->size();
}

}  // namespace bench
