#include <tandem/tensor/io/state.h>

#include <unordered_map>
#include <unordered_set>

namespace tandem {

std::vector<std::string> state_mismatches(const NamedTensors& own, const NamedTensors& given) {
  std::vector<std::string> problems;
  std::unordered_map<std::string_view, const Tensor*> found;
  for (const auto& [name, t] : given)
    if (!found.emplace(name, &t).second) problems.push_back(fmt::format("{} is given twice", name));
  std::unordered_set<std::string_view> known;
  for (const auto& [name, t] : own) {
    known.insert(name);
    const auto match = found.find(name);
    if (match == found.end()) {
      problems.push_back(fmt::format("{} of shape {} is missing from what is loaded", name, t.shape()));
    } else if (match->second->shape() != t.shape()) {
      problems.push_back(
          fmt::format("{} has shape {} in what is loaded, but {} here", name, match->second->shape(), t.shape()));
    }
  }
  for (const auto& [name, t] : given)
    if (!known.contains(name)) problems.push_back(fmt::format("{} of shape {} is unknown here", name, t.shape()));
  return problems;
}

}  // namespace tandem
