#include <tandem/parallel/reducer.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <numeric>

#include <fmt/ranges.h>

#include <tandem/autograd/engine.h>
#include <tandem/autograd/node.h>
#include <tandem/parallel/bucket.h>
#include <tandem/parallel/consistency.h>
#include <tandem/parallel/on_device.h>
#include <tandem/tensor/capture.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/fault.h>
#include <tandem/tensor/trace.h>

namespace tandem::parallel {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

}  // namespace

struct Reducer::State {
  struct Entry {
    std::string name;
    Tensor parameter;
    autograd::LeafNode* leaf = nullptr;
    Tensor view = {};
    std::size_t bucket = 0;
    bool ready = false, touched = false;
    autograd::HookHandle hook = {};
  };
  struct Filled {
    std::vector<std::size_t> entries;
    GradBucket gradients;
    std::size_t pending = 0;  // entries that are not ready
  };
  struct Flight {
    Work work = {};
    std::exception_ptr error = {};
    bool done = false;          // as far as this rank has seen; the collectives of a group end in their order
    std::int64_t launched = 0;  // on the trace's clock; 0: not traced
  };

  std::shared_ptr<ProcessGroup> group;
  CommHook hook;  // none: all_reduce
  std::vector<std::int64_t> caps;
  bool rebuild = false, rebuild_due = false, rebuilt = false, armed = false;
  int model_rank = 0;  // whose order of arrival the rebuilt plan follows
  std::vector<Entry> entries;
  std::vector<const autograd::LeafNode*> leaves;  // sorted
  std::vector<Filled> buckets;
  std::vector<Flight> flights;     // what this backward has started, a collective a bucket
  std::vector<std::size_t> order;  // of arrival in this backward
  std::exception_ptr error;        // of this rank, in this backward
  std::recursive_mutex mutex;      // in a graph on several devices, hooks run on several threads
  Clock::time_point begun, computed, under_way;
  Times times;

  // All that are armed in this process, those of ranks that are threads too.
  static inline std::mutex all_mutex;
  static inline std::vector<const State*> all_armed;

  // Error when another reducer is averaging one of the parameters: two cannot have a gradient at the same time.
  void arm() {
    const std::lock_guard lock(all_mutex);
    for (const State* other : all_armed)
      for (const Entry& entry : entries)
        check(!std::ranges::binary_search(other->leaves, entry.leaf), "DistributedDataParallel",
              "rank {} of {}: parameter '{}' belongs to two wrapped models that one backward goes through; run their "
              "backwards one after the other, or wrap one module that contains both",
              group->rank(), group->size(), entry.name);
    all_armed.push_back(this);
    armed = true;
  }
  void disarm() {
    const std::lock_guard lock(all_mutex);
    std::erase(all_armed, this);
    armed = false;
  }

  std::vector<std::vector<std::size_t>> plan_of(const std::vector<std::size_t>& sequence) const {
    std::vector<BucketItem> items;
    for (const std::size_t i : sequence) {
      const Tensor& p = entries[i].parameter;
      items.push_back({p.nbytes(), p.dtype(), p.device()});
    }
    std::vector<std::vector<std::size_t>> plan = plan_buckets(items, caps);
    for (auto& bucket : plan)
      for (std::size_t& i : bucket) i = sequence[i];
    return plan;
  }

  // Makes the buckets. A gradient that exists moves into its own at the next backward.
  void build(const std::vector<std::vector<std::size_t>>& plan) {
    for (Entry& entry : entries) {  // first, so that old and new buckets need not exist at once
      entry.view = {};
      entry.leaf->set_destination({});
    }
    buckets.clear();
    for (const auto& members : plan) {
      constexpr std::int64_t kAlign = 64;  // bytes: kernels write to aligned memory
      const Tensor& first = entries[members.front()].parameter;
      const std::int64_t step = kAlign / static_cast<std::int64_t>(size_of(first.dtype()));
      std::int64_t count = 0;
      for (const std::size_t i : members) count += (entries[i].parameter.numel() + step - 1) / step * step;
      const Device home = first.device().is_cuda() ? first.device() : Device();
      const Tensor flat = group->allocate({count}, first.dtype(), home), memory = on_device(flat, first.device());
      std::vector<std::string> names;
      std::vector<Tensor> gradients;
      std::int64_t at = 0;
      for (const std::size_t i : members) {
        Entry& entry = entries[i];
        entry.bucket = buckets.size();
        auto part = [&](const Tensor& t) {
          return t.narrow(0, at, entry.parameter.numel()).view(entry.parameter.shape()).detach();
        };
        entry.view = part(memory);
        gradients.push_back(part(flat));
        names.push_back(entry.name);
        at += (entry.parameter.numel() + step - 1) / step * step;
        entry.leaf->set_destination(entry.view);
      }
      const auto index = static_cast<int>(buckets.size());
      buckets.push_back({members, GradBucket(index, buckets.size() + 1 == plan.size(), flat, std::move(names),
                                             std::move(gradients))});
    }
  }

  // Moves a gradient that is somewhere else into the bucket.
  static void adopt(Entry& entry) {
    const Tensor gradient = entry.leaf->grad();
    if (!gradient.defined()) {
      entry.view.zero_();
    } else if (gradient.raw().data != entry.view.raw().data || !gradient.is_contiguous()) {
      entry.view.copy_(gradient.contiguous());  // it may be another view of the same memory
      entry.leaf->set_grad(entry.view);
    }
  }

  // All ranks take one rank's order.
  void rebuild_buckets() {
    const trace::Span span("rebuild buckets");
    std::vector<std::int64_t> mine(order.begin(), order.end());
    for (std::size_t i = entries.size(); i-- > 0;)
      if (std::find(order.begin(), order.end(), i) == order.end()) mine.push_back(static_cast<std::int64_t>(i));
    Tensor sequence = tensor(mine);
    group->broadcast(sequence, model_rank).wait();
    std::vector<std::size_t> chosen;
    for (const std::int64_t i : sequence.to_vector<std::int64_t>()) chosen.push_back(static_cast<std::size_t>(i));
    const auto plan = plan_of(chosen);
    const bool same = std::equal(plan.begin(), plan.end(), buckets.begin(), buckets.end(),
                                 [](const auto& members, const Filled& bucket) { return members == bucket.entries; });
    if (!same) build(plan);
    rebuild_due = false;
    rebuilt = true;
  }

  template <class Call>
  void start(const Call& call) {
    watch();
    if (!in_flight()) under_way = Clock::now();
    Flight flight{.launched = trace::is_on() ? trace::now() : 0};
    try {
      flight.work = call();
    } catch (...) {
      flight.error = std::current_exception();
    }
    flights.push_back(std::move(flight));
    if (flights.size() == 1) fault::point(fault::Point::backward);
    watch();
  }
  void launch() {
    start([this] {
      GradBucket& bucket = buckets[flights.size()].gradients;
      return hook.run ? run_hook(hook, bucket, *group) : group->all_reduce(bucket.buffer(), ReduceOp::avg);
    });
  }
  void refuse(const std::string& reason) {
    if (!error) error = std::make_exception_ptr(Error("[DistributedDataParallel] " + reason));
    start([&] { return group->fail(reason); });
  }

  bool in_flight() const { return !flights.empty() && !flights.back().done; }
  // Notices what has been done, for the times.
  void watch() {
    const bool before = in_flight();
    for (Flight& flight : flights) {
      flight.done = flight.done || flight.error || flight.work.is_completed();
      if (!flight.done) return;
      if (const std::int64_t launched = std::exchange(flight.launched, 0)) trace_bucket(flight, launched);
    }
    if (before) times.communication += seconds(Clock::now() - under_way);
  }

  void trace_bucket(const Flight& flight, std::int64_t launched) const {
    const auto i = static_cast<std::size_t>(&flight - flights.data());
    const Tensor& flat = buckets[i].gradients.buffer();
    trace::span("in flight", trace::bucket_track(static_cast<int>(i)), {"bytes", flat.nbytes()}, launched);
  }
  void trace_ready(std::size_t bucket) const { trace::instant("ready", trace::bucket_track(static_cast<int>(bucket))); }

  void arrived(std::size_t i) {
    const std::lock_guard lock(mutex);
    entries[i].touched = true;
    if (armed) mark_ready(i);
  }

  // See Note [Launch order].
  void mark_ready(std::size_t i) {
    Entry& entry = entries[i];
    check(
        !std::exchange(entry.ready, true), "DistributedDataParallel",
        "rank {} of {}: parameter '{}' got a gradient after it had been announced as complete; a hook runs a backward "
        "of its own: run it before or after this one",
        group->rank(), group->size(), entry.name);
    order.push_back(i);
    adopt(entry);
    if (--buckets[entry.bucket].pending == 0) trace_ready(entry.bucket);
    while (flights.size() < buckets.size() && buckets[flights.size()].pending == 0) launch();
  }
};

Reducer::Reducer(NamedTensors parameters, std::shared_ptr<ProcessGroup> group, std::vector<std::int64_t> caps,
                 bool rebuild)
    : state_(std::make_unique<State>()) {
  const NoGradGuard no_grad;
  State& s = *state_;
  s.group = std::move(group);
  s.caps = std::move(caps);
  s.rebuild = rebuild;
  for (auto& [name, p] : parameters) {
    autograd::LeafNode& leaf = autograd::leaf_of("DistributedDataParallel", p);
    s.entries.push_back({.name = std::move(name), .parameter = p, .leaf = &leaf});
    s.leaves.push_back(&leaf);
  }
  std::ranges::sort(s.leaves);
  std::vector<std::size_t> reverse(s.entries.size());
  std::iota(reverse.rbegin(), reverse.rend(), std::size_t{0});
  s.build(s.plan_of(reverse));
  for (std::size_t i = 0; i < s.entries.size(); ++i)
    s.entries[i].hook = s.entries[i].leaf->post_hooks.add([&s, i](const Tensor&) { s.arrived(i); });
}

Reducer::~Reducer() {
  state_->disarm();
  for (State::Entry& entry : state_->entries) entry.leaf->set_destination({});
}

void Reducer::set_hook(CommHook hook) {
  check(!state_->hook.run, "DistributedDataParallel",
        "the model has the communication hook '{}' already; register one hook, once", state_->hook.name);
  check(state_->begun == Clock::time_point(), "DistributedDataParallel",
        "the communication hook '{}' comes after the first backward; register it before", hook.name);
  state_->hook = std::move(hook);
}

void Reducer::begin(FunctionRef<int()> lowest) {
  State& s = *state_;
  const NoGradGuard no_grad;
  const std::lock_guard lock(s.mutex);
  check(!s.armed, "DistributedDataParallel",
        "rank {} of {}: a backward of the model began inside another one of it; run them one after the other",
        s.group->rank(), s.group->size());
  check(
      !cuda::capturing() || (s.begun != Clock::time_point() && !s.rebuild && !s.rebuild_due), "DistributedDataParallel",
      "rank {} of {}: a step is captured in a cuda::Graph too early: in the first two backwards the ranks compare "
      "their "
      "hooks and make buckets anew, which replays would not do; let every rank run two ordinary steps before capture()",
      s.group->rank(), s.group->size());
  s.arm();
  try {
    const int rank = lowest();
    if (s.rebuild) s.model_rank = rank;
    if (s.begun == Clock::time_point()) {
      const Purpose purpose("the first backward of a DistributedDataParallel");
      verify_alike({{"communication hook", s.hook.run ? fmt::format("'{}'", s.hook.name) : "none"}}, *s.group,
                   "call register_comm_hook on every rank, with the same hook, before the first backward");
    }
    if (s.rebuild_due) s.rebuild_buckets();
  } catch (...) {
    s.disarm();
    throw;
  }
  s.order.clear();
  for (State::Entry& entry : s.entries) entry.ready = false;
  for (State::Filled& bucket : s.buckets) bucket.pending = bucket.entries.size();
  s.times = {};
  s.begun = Clock::now();
  s.computed = {};
}

void Reducer::mark_ready(std::size_t parameter) {
  const NoGradGuard no_grad;
  const std::lock_guard lock(state_->mutex);
  state_->mark_ready(parameter);
}

void Reducer::launch_rest(bool zeros) {
  State& s = *state_;
  const NoGradGuard no_grad;
  s.watch();
  s.computed = Clock::now();
  s.times.backward = seconds(s.computed - s.begun);
  s.times.overlap = s.times.communication + (s.in_flight() ? seconds(s.computed - s.under_way) : 0);
  while (s.flights.size() < s.buckets.size()) {
    State::Filled& bucket = s.buckets[s.flights.size()];
    if (bucket.pending > 0) s.trace_ready(s.flights.size());
    std::vector<std::string> missing;
    for (const std::size_t i : bucket.entries) {
      State::Entry& entry = s.entries[i];
      if (entry.ready) continue;
      if (!zeros && !entry.leaf->grad().defined()) missing.push_back(entry.name);
      entry.ready = true;
      State::adopt(entry);
    }
    if (missing.empty()) {
      s.launch();
      continue;
    }
    s.refuse(fmt::format(
        "rank {} of {}: parameter{} '{}' got no gradient in this backward; every parameter must take part in the loss "
        "on every rank: freeze it with requires_grad_(false) before wrapping, or set find_unused_parameters",
        s.group->rank(), s.group->size(), missing.size() > 1 ? "s" : "", fmt::join(missing, "', '")));
  }
}

void Reducer::fail_rest(const std::string& reason) {
  State& s = *state_;
  s.computed = Clock::now();
  while (s.flights.size() < s.buckets.size()) s.refuse(reason);
}

std::exception_ptr Reducer::wait(double scale) {
  State& s = *state_;
  const NoGradGuard no_grad;
  std::exception_ptr error = s.error;
  bool others_go_on = !error;
  for (State::Flight& flight : s.flights) {
    try {
      flight.work.wait();
    } catch (...) {
      flight.error = std::current_exception();
    }
    if (!error) error = flight.error;
    others_go_on &= !flight.error || flight.work.failed_alone();
  }
  s.watch();
  s.times.exposed = seconds(Clock::now() - s.computed);
  trace::span("exposed wait", trace::kThisThread, {}, std::chrono::nanoseconds(s.computed.time_since_epoch()).count());
  s.disarm();
  s.error = nullptr;
  s.flights.clear();
  if (!others_go_on) return error;
  if (scale != 1)
    for (State::Filled& bucket : s.buckets) bucket.gradients.buffer().mul_(scale);
  for (State::Entry& entry : s.entries) entry.touched = false;
  s.rebuild_due = std::exchange(s.rebuild, false);
  return error;
}

std::size_t Reducer::size() const { return state_->entries.size(); }
const Tensor& Reducer::parameter(std::size_t i) const { return state_->entries[i].parameter; }
const Tensor& Reducer::view(std::size_t i) const { return state_->entries[i].view; }
bool Reducer::touched(std::size_t i) const { return state_->entries[i].touched; }
bool Reducer::rebuilt() const { return state_->rebuilt; }
Reducer::Times Reducer::times() const { return state_->times; }

std::vector<Reducer::Bucket> Reducer::plan() const {
  std::vector<Bucket> plan;
  for (const State::Filled& bucket : state_->buckets) {
    Bucket& shown = plan.emplace_back();
    for (const std::size_t i : bucket.entries) {
      const Tensor& p = state_->entries[i].parameter;
      shown.parameters.push_back(state_->entries[i].name);
      shown.bytes += p.nbytes();
    }
  }
  return plan;
}

std::vector<std::string> Reducer::arrival_order() const {
  std::vector<std::string> names;
  for (const std::size_t i : state_->order) names.push_back(state_->entries[i].name);
  return names;
}

}  // namespace tandem::parallel
