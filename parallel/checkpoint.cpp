#include <tandem/parallel/checkpoint.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>

#include <fmt/format.h>

#include <tandem/autograd/functions.h>
#include <tandem/parallel/on_rank_0.h>
#include <tandem/parallel/own_part.h>
#include <tandem/parallel/zero.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/random.h>

namespace tandem::parallel {
namespace {

// A row for each rank: its seed, and how far it has used each stream. A file does not have it where all ranks have one
// state, which is what load restores anyway.
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

// A state that was gathered, in the place of the object whose state it is.
class Gathered final : public Stateful {
 public:
  Gathered(std::string name, NamedTensors state) : name_(std::move(name)), state_(std::move(state)) {}
  std::string state_name() const override { return name_; }
  NamedTensors state_dict() const override { return state_; }
  std::vector<std::string> state_problems(const NamedTensors&) const override { return {"it can only be read"}; }
  void load_state_dict(const NamedTensors&) override { fail(name_, "a gathered state can only be read"); }

 private:
  std::string name_;
  NamedTensors state_;
};

// A number that differs between files, almost surely.
std::int64_t digest_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string part(std::size_t{1} << 20, '\0');
  std::uint64_t digest = 0;
  while (file.read(part.data(), static_cast<std::streamsize>(part.size())) || file.gcount() > 0) {
    const std::string_view bytes(part.data(), static_cast<std::size_t>(file.gcount()));
    digest = digest * 0x9E3779B97F4A7C15u + std::hash<std::string_view>()(bytes);
  }
  return static_cast<std::int64_t>(digest);
}

// Hosts may have files of their own under one name.
void compare_files(const std::string& path, ProcessGroup& group) {
  Tensor all = zeros({group.size()}, {.dtype = int64});
  group.all_gather(all, tensor(std::vector{digest_of(path)})).wait();
  const std::vector<std::int64_t> digests = all.to_vector<std::int64_t>();
  for (std::size_t r = 1; r < digests.size(); ++r)
    check(digests[r] == digests[0], "load_checkpoint",
          "{} is not the same file on rank {} as on rank 0; copy it, or give one that all ranks can reach", path, r);
}

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

RandomState state_of(const Tensor& row) {
  std::vector<std::int64_t> numbers = row.to_vector<std::int64_t>();
  while (numbers.size() > 1 && numbers.back() == 0) numbers.pop_back();
  return {.seed = static_cast<std::uint64_t>(numbers.front()), .positions = {numbers.begin() + 1, numbers.end()}};
}

// Whether a file has the states of ranks; true where it cannot be read, which load says better.
bool has_states(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::uint64_t length = 0;
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (!file.read(reinterpret_cast<char*>(&length), sizeof length) || error || length > size) return true;
  std::string header(length, '\0');
  if (!file.read(header.data(), static_cast<std::streamsize>(length))) return true;
  return header.find("\"random_of_ranks.states\"") != std::string::npos;
}

}  // namespace

void save_checkpoint(const std::string& path, const std::vector<StateRef<const Stateful>>& parts,
                     const std::shared_ptr<ProcessGroup>& given) {
  const Purpose purpose("save_checkpoint");
  ProcessGroup& group = given ? *given : *default_group();
  RandomOfRanks random(group.size());
  random.states = gather_states(group);
  std::vector<StateRef<const Stateful>> all;
  std::deque<Gathered> gathered;  // what is divided among the ranks
  for (const StateRef<const Stateful>& part : parts) {
    const auto* divided = dynamic_cast<const ZeroRedundancyOptimizer*>(&*part);
    if (divided == nullptr) {
      all.push_back(part);
      continue;
    }
    NamedTensors state = divided->group().get() == &group ? divided->gather_state(0) : divided->state_dict();
    all.emplace_back(part.name(), gathered.emplace_back(part.name(), std::move(state)));
  }
  bool alike = true;
  for (int r = 1; r < group.size(); ++r) alike = alike && equal(random.states[r], random.states[0]);
  if (!alike) all.push_back(random);
  on_rank_0([&] { save(path, all); }, group);
}

void load_checkpoint(const std::string& path, const std::vector<StateRef<Stateful>>& parts, const LoadOptions& options,
                     const std::shared_ptr<ProcessGroup>& given) {
  const Purpose purpose("load_checkpoint");
  ProcessGroup& group = given ? *given : *default_group();
  RandomOfRanks random(group.size());
  std::vector<StateRef<Stateful>> all = parts;
  compare_files(path, group);
  const bool own = has_states(path);
  if (own) all.push_back(random);
  do_own_part(group, [&] { load(path, all, options); });
  if (own) set_random_state(state_of(random.states[group.rank()]));
  group.barrier().wait();  // ranks that are threads have one state: nobody draws before all have set it
}

}  // namespace tandem::parallel
