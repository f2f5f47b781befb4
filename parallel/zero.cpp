// The cut of the parameters, the step on this rank's share, and the state put together and taken apart.
#include <tandem/parallel/zero.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include <tandem/autograd/grad_mode.h>
#include <tandem/optim/state_reader.h>
#include <tandem/parallel/consistency.h>
#include <tandem/parallel/contents.h>
#include <tandem/parallel/joinable.h>
#include <tandem/parallel/on_device.h>
#include <tandem/parallel/own_part.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/trace.h>

namespace tandem::parallel {
namespace {

constexpr const char* kZero = "ZeroRedundancyOptimizer";
constexpr const char* kSameOptimizer = "make, set, load and step the same optimizer of the same model on every rank";

std::int64_t elements_of_cache_line(DType dtype) { return 64 / static_cast<std::int64_t>(size_of(dtype)); }

// Settings and numbers of steps: what every rank has, while buffers are of its own slices.
NamedTensors numbers_of(NamedTensors state) {
  std::erase_if(state, [](const auto& entry) { return entry.second.dim() > 0; });
  return state;
}

// What the hooks before a first step compare.
class NumbersOf final : public Stateful {
 public:
  explicit NumbersOf(const optim::Optimizer& optimizer) : optimizer_(optimizer) {}
  std::string state_name() const override { return optimizer_.state_name(); }
  NamedTensors state_dict() const override { return numbers_of(optimizer_.state_dict()); }
  std::vector<std::string> state_problems(const NamedTensors&) const override { return {"it can only be read"}; }
  void load_state_dict(const NamedTensors&) override { fail(kZero, "numbers alone can only be read"); }

 private:
  const optim::Optimizer& optimizer_;
};

// A parameter that has no state on one rank alone is named.
void verify_numbers(const NamedTensors& state, std::size_t parameters,
                    std::vector<std::pair<std::string, std::string>> values, ProcessGroup& group) {
  std::vector<std::string> steps(parameters, "none");
  for (const auto& [name, number] : numbers_of(state)) {
    std::string text = number.dtype() == float64 ? fmt::format("{}", number.item<double>())
                                                 : fmt::format("{}", number.item<std::int64_t>());
    std::size_t i = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), i).ec == std::errc() && i < parameters &&
        name == fmt::format("{}.step", i))
      steps[i] = std::move(text);
    else
      values.emplace_back(fmt::format("optimizer state '{}'", name), std::move(text));
  }
  for (std::size_t i = 0; i < parameters; ++i)
    values.emplace_back(fmt::format("optimizer state '{}.step'", i), std::move(steps[i]));
  verify_alike(values, group, kSameOptimizer);
}

// The parameter that an entry is a buffer of, and the buffer's name, as of "3.exp_avg".
struct BufferName {
  std::size_t parameter = 0;
  std::string buffer;
};
std::optional<BufferName> buffer_name(const std::string& entry, std::size_t parameters) {
  BufferName name;
  const char* const last = entry.data() + entry.size();
  const auto number = std::from_chars(entry.data(), last, name.parameter);
  if (number.ec != std::errc() || number.ptr == last || *number.ptr != '.' || name.parameter >= parameters)
    return std::nullopt;
  name.buffer.assign(number.ptr + 1, last);
  if (name.buffer == "step") return std::nullopt;
  return name;
}

}  // namespace

// A step of the others is one of an ended rank, too, since it has a share of the parameters.
struct ZeroRedundancyOptimizer::InJoin final : Joinable {
  explicit InJoin(ZeroRedundancyOptimizer& optimizer) : zero(optimizer) { enroll(*zero.group_); }
  std::string name_of(int) const override { return "a step of a ZeroRedundancyOptimizer"; }
  void shadow(int, const Participants& who) override { step(who, true); }
  void step(const Participants& who, bool ended) {
    const Purpose purpose("ZeroRedundancyOptimizer::step");
    if (!who.ended.empty()) zero.take_over_step(who.lowest, ended);
    zero.step_own_share();
    zero.share_parameters();
  }
  void take_over(int root, bool ended) override { zero.take_over_step(root, ended); }
  ZeroRedundancyOptimizer& zero;
};

ZeroRedundancyOptimizer::~ZeroRedundancyOptimizer() = default;

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(std::vector<Tensor> parameters, Factory factory,
                                                 std::shared_ptr<ProcessGroup> group)
    : group_(or_default(std::move(group))), parameters_(std::move(parameters)) {
  check(group_->rank() >= 0, kZero, "this process is not a member of the group; only its members make the optimizer");
  check(!Joinable::joining(*group_), kZero,
        "rank {} of {}: a divided optimizer is made in a join; make it before the join", group_->rank(),
        group_->size());
  const Purpose purpose("the making of a ZeroRedundancyOptimizer");
  do_own_part(*group_, [&] {
    optim::check_parameters(kZero, parameters_);
    if (!parameters_.empty() && parameters_.front().device().is_cuda()) home_ = parameters_.front().device();
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      check(share_memory(parameters_[i].device(), home_), kZero,
            "parameter 0 is on {} and parameter {} on {}, but they are divided as one array; move the model to one "
            "device",
            home_, i, parameters_[i].device());
    check(
        group_->serves(home_), kZero,
        "the parameters are on {}, but the ranks work together over {}, which serves tensors of the CPU; leave out the "
        "backend, or give \"nccl\"",
        home_, group_->backend());
    plan();
    std::vector<Tensor> slices;
    for (const Place& place : places_) slices.push_back(place.slice);
    local_ = factory(slices);
    check(local_ != nullptr, kZero, "the factory gave no optimizer; return std::make_unique<optim::Adam>(slices)");
    const std::vector<Tensor> taken = local_->parameters();
    check(std::equal(taken.begin(), taken.end(), slices.begin(), slices.end(),
                     [](const Tensor& a, const Tensor& b) { return a.identity() == b.identity(); }),
          kZero, "the factory has not made its optimizer of the {} slices that it was given; use each once, in order",
          slices.size());
  });
  std::vector<std::pair<std::string, std::string>> values{{"optimizer", local_->name()},
                                                          {"device", home_.is_cuda() ? "a GPU" : "the CPU"}};
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    values.emplace_back(fmt::format("parameter {}", i),
                        fmt::format("{} {}", parameters_[i].dtype(), parameters_[i].shape()));
  verify_numbers(local_->state_dict(), parameters_.size(), std::move(values), *group_);
  move_parameters();
  in_join_ = std::make_unique<InJoin>(*this);
}

void ZeroRedundancyOptimizer::plan() {
  for (const Tensor& p : parameters_) {
    auto line = std::find_if(lines_.begin(), lines_.end(), [&](const Line& l) { return l.dtype == p.dtype(); });
    if (line == lines_.end()) line = lines_.insert(lines_.end(), {.dtype = p.dtype()});
    places_.push_back({.line = static_cast<std::size_t>(line - lines_.begin()), .offset = line->count});
    const std::int64_t step = elements_of_cache_line(p.dtype());
    line->count += (p.numel() + step - 1) / step * step;
  }
  for (Line& line : lines_) {
    const std::int64_t step = elements_of_cache_line(line.dtype) * group_->size();
    line.share = (line.count + step - 1) / step * elements_of_cache_line(line.dtype);
  }
  for (std::size_t i = 0; i < places_.size(); ++i) {
    Place& place = places_[i];
    const std::int64_t first = lines_[place.line].share * group_->rank() - place.offset;
    place.begin = std::clamp<std::int64_t>(first, 0, parameters_[i].numel());
    place.end = std::clamp<std::int64_t>(first + lines_[place.line].share, 0, parameters_[i].numel());
    place.slice = parameters_[i].detach().view({-1}).narrow(0, place.begin, place.end - place.begin).detach();
    place.slice.requires_grad_();
  }
}

// Each parameter keeps a storage, and so a version, of its own.
void ZeroRedundancyOptimizer::move_parameters() {
  const NoGradGuard no_grad;
  for (Line& line : lines_) line.whole = group_->allocate({line.share * group_->size()}, line.dtype, home_);
  for (std::size_t i = 0; i < places_.size(); ++i) {
    Place& place = places_[i];
    Tensor& p = parameters_[i];
    const Tensor room = lines_[place.line].whole.narrow(0, place.offset, p.numel());
    const auto bytes = static_cast<std::size_t>(p.nbytes());
    place.memory = make_view(std::make_shared<Storage>(room.raw().data, bytes, p.device(), room.identity()->storage), 0,
                             p.shape(), contiguous_strides(p.shape()), p.dtype());
    place.memory.copy_(p.detach());
    p.set_data(place.memory);
    place.slice.set_data(place.memory.view({-1}).narrow(0, place.begin, place.end - place.begin));
  }
}

void ZeroRedundancyOptimizer::take_gradients() {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    Place& place = places_[i];
    const Tensor& p = parameters_[i];
    check(p.identity()->storage == place.memory.identity()->storage && p.shape() == place.memory.shape() &&
              p.dtype() == place.memory.dtype() && p.is_contiguous(),
          kZero,
          "parameter {} was moved, converted or given another shape after the optimizer was made; make the optimizer "
          "afterwards, and load the state into it",
          i);
    const Tensor g = p.grad();
    if (!g.defined()) continue;
    check(g.shape() == p.shape() && g.dtype() == p.dtype() && g.device() == p.device(), kZero,
          "parameter {} is {} {} on {}, but its gradient is {} {} on {}; call zero_grad() and backward() after a model "
          "is moved or converted",
          i, p.dtype(), p.shape(), p.device(), g.dtype(), g.shape(), g.device());
    place.slice.set_grad(g.contiguous().view({-1}).narrow(0, place.begin, place.end - place.begin));
  }
}

void ZeroRedundancyOptimizer::step() { in_join_->step(in_join_->announce(0), false); }

// What rank `from` steps with reaches the ranks that have ended: gradients, which it may have clipped, and settings,
// which schedules change.
void ZeroRedundancyOptimizer::take_over_step(int from, bool ended) {
  const NoGradGuard no_grad;
  const bool gives = group_->rank() == from;
  NamedTensors state = local_->state_dict();
  NamedTensors numbers = numbers_of(state);
  const auto count = static_cast<std::int64_t>(places_.size());
  Tensor said = zeros({count + static_cast<std::int64_t>(numbers.size())}, {.dtype = float64});
  do_own_part(*group_, [&] {
    take_gradients();  // for its checks
    local_->zero_grad();
    auto* values = said.data<double>();
    for (const Tensor& p : parameters_) *values++ = p.grad().defined() ? 1 : 0;
    for (const auto& entry : numbers) *values++ = entry.second.to(float64).item<double>();
    group_->broadcast(said, from).wait();
  });
  const std::vector<double> given = said.to_vector<double>();
  for (std::size_t k = 0; k < lines_.size(); ++k) {
    const Line& line = lines_[k];
    Tensor whole, own = zeros({line.share}, {.dtype = line.dtype, .device = home_});
    if (gives) whole = zeros({line.share * group_->size()}, {.dtype = line.dtype, .device = home_});
    for (std::size_t i = 0; gives && i < places_.size(); ++i)
      if (places_[i].line == k && given[i] != 0)
        whole.narrow(0, places_[i].offset, parameters_[i].numel()).copy_(parameters_[i].grad().reshape({-1}));
    group_->scatter(own, whole, from).wait();
    for (std::size_t i = 0; ended && i < places_.size(); ++i) {
      const Place& place = places_[i];
      if (place.line != k) continue;
      Tensor p = parameters_[i];
      if (given[i] == 0) p.set_grad({});
      if (given[i] == 0 || place.begin == place.end) continue;
      if (!p.grad().defined()) p.set_grad(zeros_like(p.detach()));
      p.grad()
          .view({-1})
          .narrow(0, place.begin, place.end - place.begin)
          .copy_(own.narrow(0, place.offset + place.begin - line.share * group_->rank(), place.end - place.begin));
    }
  }
  if (!ended) return;
  bool same = true;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const double value = given[places_.size() + i];
    same = same && numbers[i].second.to(float64).item<double>() == value;
    for (auto& [name, t] : state)
      if (name == numbers[i].first) t = full(t.shape(), value, {.dtype = t.dtype(), .device = t.device()});
  }
  if (!same) local_->load_state_dict(state);
}

void ZeroRedundancyOptimizer::step_own_share() {
  const NoGradGuard no_grad;
  // A view of a gradient that stays would keep the next backward from writing it to the same place.
  struct Forget {
    optim::Optimizer& optimizer;
    ~Forget() { optimizer.zero_grad(); }
  };
  const Forget forget{*local_};
  do_own_part(*group_, [&] {
    take_gradients();
    optim::call_first_step_hooks(parameters_, NumbersOf(*local_));
    verify_step();
    local_->step();
  });
}

// The parts of ranks that step with other settings, or not with the same gradients, do not belong together. That costs
// one number of each rank. The first step compares the parameters, too.
void ZeroRedundancyOptimizer::verify_step() {
  if (group_->size() == 1) return;
  const NamedTensors state = local_->state_dict();
  std::vector<double> said;
  for (const Tensor& p : parameters_) said.push_back(p.grad().defined() ? 1 : 0);
  for (const auto& entry : numbers_of(state)) said.push_back(entry.second.to(float64).item<double>());
  std::vector<std::uint64_t> hashes;
  if (!compared_)
    for (const Tensor& p : parameters_) hashes.push_back(hash(bytes_of(readable(p.detach()))));
  const auto bits =
      static_cast<std::int64_t>(hash(std::as_bytes(std::span(said))) * 31 + hash(std::as_bytes(std::span(hashes))));
  Tensor all = zeros({group_->size()}, {.dtype = int64});
  group_->all_gather(all, full({1}, bits, {.dtype = int64})).wait();
  const std::vector<std::int64_t> digests = all.to_vector<std::int64_t>();
  if (std::ranges::any_of(digests, [&](std::int64_t digest) { return digest != digests.front(); })) {
    std::vector<std::pair<std::string, std::string>> values;
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      values.emplace_back(fmt::format("gradient of parameter {}", i), said[i] != 0 ? "there" : "missing");
    for (std::size_t i = 0; i < hashes.size(); ++i)
      values.emplace_back(fmt::format("parameter {}", i), fmt::format("values with the hash {:016x}", hashes[i]));
    verify_numbers(state, parameters_.size(), std::move(values), *group_);
  }
  compared_ = true;
}

void ZeroRedundancyOptimizer::share_parameters() {
  const trace::Span span("share parameters");
  for (Tensor& p : parameters_)
    if (p.grad().defined()) p.mark_changed();
  std::vector<Work> works;
  for (Line& line : lines_)
    works.push_back(group_->all_gather(line.whole, line.whole.narrow(0, line.share * group_->rank(), line.share)));
  for (Work& work : works) work.wait();
}

void ZeroRedundancyOptimizer::zero_grad() {
  for (Tensor& p : parameters_) p.set_grad({});
}

NamedTensors ZeroRedundancyOptimizer::gather(bool everywhere, int root) const {
  const NoGradGuard no_grad;
  NamedTensors state = local_->state_dict();
  verify_numbers(state, parameters_.size(), {}, *group_);
  // Buffers of one name and type travel together, laid out as the parameters are.
  std::map<std::pair<std::string, std::size_t>, std::vector<std::size_t>> kinds;
  for (std::size_t k = 0; k < state.size(); ++k)
    if (const auto name = buffer_name(state[k].first, places_.size()))
      kinds[{name->buffer, places_[name->parameter].line}].push_back(k);
  const bool receives = everywhere || group_->rank() == root;
  for (const auto& [kind, entries] : kinds) {
    const Line& line = lines_[kind.second];
    const std::int64_t first = line.share * group_->rank();
    Tensor whole, own;
    if (receives) whole = zeros({line.share * group_->size()}, {.dtype = line.dtype, .device = home_});
    own = receives ? whole.narrow(0, first, line.share) : zeros({line.share}, {.dtype = line.dtype, .device = home_});
    auto place_of = [&](std::size_t k) -> const Place& {
      return places_[buffer_name(state[k].first, places_.size())->parameter];
    };
    for (const std::size_t k : entries) {
      const Place& place = place_of(k);
      if (place.begin < place.end)
        own.narrow(0, place.offset + place.begin - first, place.end - place.begin).copy_(state[k].second);
    }
    (everywhere ? group_->all_gather(whole, own) : group_->gather(whole, own, root)).wait();
    for (const std::size_t k : entries) {
      if (!receives) continue;
      const Place& place = place_of(k);
      state[k].second = whole.narrow(0, place.offset, place.memory.numel()).view(place.memory.shape());
    }
  }
  return receives ? state : NamedTensors();
}

NamedTensors ZeroRedundancyOptimizer::state_dict() const {
  const Purpose purpose("ZeroRedundancyOptimizer::state_dict (save and load call it)");
  return gather(true, 0);
}
NamedTensors ZeroRedundancyOptimizer::gather_state(int root) const {
  check(root >= 0 && root < group_->size(), kZero, "gather_state: root {} is out of range: the group has ranks 0 to {}",
        root, group_->size() - 1);
  const Purpose purpose("ZeroRedundancyOptimizer::gather_state");
  return gather(false, root);
}

// The state as this rank's optimizer would have it. A buffer that does not fit its parameter becomes a problem.
NamedTensors ZeroRedundancyOptimizer::cut(const NamedTensors& state, std::vector<std::string>& problems) const {
  const NoGradGuard no_grad;
  NamedTensors own = state;
  for (auto& [entry, t] : own) {
    const auto name = buffer_name(entry, places_.size());
    if (!name || !t.defined()) continue;
    const Place& place = places_[name->parameter];
    const Tensor& p = place.memory;
    const bool fits = t.shape() == p.shape() && t.dtype() == p.dtype();
    if (!fits)
      problems.push_back(
          fmt::format("{} is {} {}, but {} {} is needed", entry, t.dtype(), t.shape(), p.dtype(), p.shape()));
    const std::int64_t count = place.end - place.begin;
    t = fits ? t.detach().reshape({-1}).narrow(0, place.begin, count)
             : empty({count}, {.dtype = p.dtype(), .device = p.device()});
  }
  return own;
}

std::vector<std::string> ZeroRedundancyOptimizer::state_problems(const NamedTensors& state) const {
  std::vector<std::string> problems;
  const NamedTensors own = cut(state, problems);
  for (std::string& problem : local_->state_problems(own)) problems.push_back(std::move(problem));
  return problems;
}

void ZeroRedundancyOptimizer::load_state_dict(const NamedTensors& state) {
  optim::check_fits(kZero, "an optimizer of this kind for this model", state_problems(state));
  std::vector<std::string> none;
  local_->load_state_dict(cut(state, none));
}

}  // namespace tandem::parallel
