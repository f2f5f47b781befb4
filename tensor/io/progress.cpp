#include <tandem/tensor/io/progress.h>

#include <fmt/format.h>

#include <tandem/tensor/create.h>

namespace tandem {
namespace {
constexpr std::string_view kNumbers = "numbers.";
}

NamedTensors Progress::state_dict() const {
  NamedTensors state = {{"epoch", tensor(epoch)}, {"batch", tensor(batch)}, {"step", tensor(step)}};
  for (const auto& [name, value] : numbers)
    state.emplace_back(std::string(kNumbers) + name, tensor(value, {.dtype = float64}));
  return state;
}

std::vector<std::string> Progress::state_problems(const NamedTensors& state) const {
  // Which numbers there are is the state's to say; counters must be as here.
  NamedTensors own = Progress().state_dict();
  for (const auto& [name, t] : state)
    if (name.starts_with(kNumbers)) own.emplace_back(name, tensor(0.0));
  std::vector<std::string> problems = state_mismatches(own, state);
  for (const auto& [name, t] : state)
    if (!name.starts_with(kNumbers) && !is_integral(t.dtype()))
      problems.push_back(fmt::format("{} is {}, but must be a whole number", name, t.dtype()));
  return problems;
}

void Progress::load_state_dict(const NamedTensors& state) {
  const auto problems = state_problems(state);
  check(problems.empty(), "Progress", "the state does not fit, and nothing was changed; load a saved Progress:\n  {}",
        fmt::format("{}", fmt::join(problems, "\n  ")));
  numbers.clear();
  for (const auto& [name, t] : state) {
    if (name.starts_with(kNumbers)) numbers[name.substr(kNumbers.size())] = t.item<double>();
    if (name == "epoch") epoch = t.item<std::int64_t>();
    if (name == "batch") batch = t.item<std::int64_t>();
    if (name == "step") step = t.item<std::int64_t>();
  }
}

}  // namespace tandem
