#include <tandem/parallel/checkpoint.h>

#include <algorithm>

#include <fmt/format.h>

#include <tandem/tensor/create.h>
#include <tandem/tensor/random.h>

namespace tandem::parallel {
namespace {

// A row for each rank: its seed, and how far it has used each stream.
class RandomOfRanks final : public Stateful {
 public:
  explicit RandomOfRanks(std::int64_t ranks) : states(zeros({ranks, 1}, {.dtype = int64})) {}
  std::string state_name() const override { return "random_of_ranks"; }
  NamedTensors state_dict() const override { return {{"states", states}}; }
  std::vector<std::string> state_problems(const NamedTensors& state) const override {
    const bool known = state.size() == 1 && state[0].first == "states" && state[0].second.dtype() == int64 &&
                       state[0].second.dim() == 2 && state[0].second.size(1) >= 1 &&
                       state[0].second.size(1) <= 1 + kMaxStreams;
    if (!known) return {"it is not what save_checkpoint writes"};
    const std::int64_t then = state[0].second.size(0), now = states.size(0);
    if (then != now) return {fmt::format("the file was saved by {} ranks, but there are {}", then, now)};
    return {};
  }
  void load_state_dict(const NamedTensors& state) override { states = state[0].second.clone(); }

  Tensor states;
};

// All ranks are here, so that those that are threads draw no numbers meanwhile.
Tensor gather_states(ProcessGroup& group) {
  group.barrier().wait();
  RandomState state = random_state();
  std::vector<std::uint64_t>& mine = state.positions;
  mine.insert(mine.begin(), state.seed);
  Tensor most = full({1}, static_cast<std::int64_t>(mine.size()), {.dtype = int64});
  group.all_reduce(most, ReduceOp::max).wait();
  Tensor row = zeros({1, most.item<std::int64_t>()}, {.dtype = int64});
  std::copy(mine.begin(), mine.end(), row.data<std::int64_t>());
  Tensor all = zeros({group.size(), row.size(1)}, {.dtype = int64});
  group.all_gather(all, row).wait();
  return all;
}

}  // namespace

void save_checkpoint(const std::string& path, const std::vector<StateRef<const Stateful>>& parts,
                     const std::shared_ptr<ProcessGroup>& given) {
  ProcessGroup& group = given ? *given : *default_group();
  RandomOfRanks random(group.size());
  random.states = gather_states(group);
  if (group.rank() == 0) {
    try {
      std::vector<StateRef<const Stateful>> all = parts;
      all.push_back(random);
      save(path, all);
    } catch (const std::exception& e) {
      group.fail(e.what()).wait();
      throw;
    }
  }
  group.barrier().wait();
}

void load_checkpoint(const std::string& path, const std::vector<StateRef<Stateful>>& parts, const LoadOptions& options,
                     const std::shared_ptr<ProcessGroup>& given) {
  ProcessGroup& group = given ? *given : *default_group();
  RandomOfRanks random(group.size());
  std::vector<StateRef<Stateful>> all = parts;
  all.push_back(random);
  load(path, all, options);
  const std::vector<std::int64_t> mine = random.states[group.rank()].to_vector<std::int64_t>();
  set_random_state({.seed = static_cast<std::uint64_t>(mine.front()), .positions = {mine.begin() + 1, mine.end()}});
  group.barrier().wait();  // ranks that are threads have one state: nobody draws before all have set it
}

}  // namespace tandem::parallel
