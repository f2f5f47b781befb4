#include <tandem/tensor/io/checkpoint.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include <fmt/format.h>

#include <tandem/tensor/create.h>
#include <tandem/tensor/io/safetensors.h>
#include <tandem/tensor/random.h>

namespace tandem {
namespace {

// Note [Files with several parts]: the metadata kPartsKey lists the parts, separated by commas; entries of a part are
// named "part.entry". The random state is always among them, as the part kRandom, which no object may be called.
constexpr const char* kPartsKey = "tandem.parts";
constexpr const char* kRandom = "random";
// Other Python libraries look at this to learn how the tensors are to be understood.
const std::map<std::string, std::string> kFormat = {{"format", "pt"}};

std::optional<std::vector<std::string>> parts_of(const Safetensors& file) {
  const auto found = file.metadata.find(kPartsKey);
  if (found == file.metadata.end()) return std::nullopt;
  std::vector<std::string> parts(1);
  for (const char c : found->second) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

NamedTensors part_of(const Safetensors& file, const std::string& part) {
  NamedTensors state;
  const std::string prefix = part + ".";
  for (const auto& [name, t] : file.tensors)
    if (name.starts_with(prefix)) state.emplace_back(name.substr(prefix.size()), t);
  return state;
}

template <class S>
void check_names(std::string_view op, const std::vector<StateRef<S>>& parts) {
  std::unordered_set<std::string> names;
  for (const StateRef<S>& part : parts) {
    const std::string name = part.name();
    check(!name.empty() && name.find_first_of(".,") == std::string::npos && name != kRandom, op,
          "\"{}\" cannot be the name of a part; choose one without points and commas, and not \"{}\"", name, kRandom);
    check(names.insert(name).second, op,
          "two parts are called \"{}\"; give them names, as in {{{{\"generator\", a}}, {{\"discriminator\", b}}}}",
          name);
  }
}

NamedTensors random_tensors() {
  const RandomState state = random_state();
  const std::vector<int64_t> positions(state.positions.begin(), state.positions.end());
  return {{"seed", tensor(static_cast<int64_t>(state.seed))}, {"positions", tensor(positions)}};
}

// Reads the random state; appends what is wrong with it.
RandomState to_random_state(const NamedTensors& state, std::vector<std::string>& problems) {
  RandomState out;
  const auto find = [&](std::string_view name, int dims) {
    const auto match = std::find_if(state.begin(), state.end(), [&](const auto& entry) { return entry.first == name; });
    if (match != state.end() && match->second.dtype() == int64 && match->second.dim() == dims &&
        match->second.numel() <= kMaxStreams)
      return match->second.to_vector<int64_t>();
    problems.push_back(fmt::format("{}.{} must be there and be int64 of {} dimensions, at most {} numbers", kRandom,
                                   name, dims, kMaxStreams));
    return std::vector<int64_t>();
  };
  for (const int64_t seed : find("seed", 0)) out.seed = static_cast<std::uint64_t>(seed);
  for (const int64_t position : find("positions", 1)) out.positions.push_back(static_cast<std::uint64_t>(position));
  return out;
}

// The entries that the object knows, from the file where it has them, else as they are.
NamedTensors relaxed(const Stateful& object, const NamedTensors& given) {
  std::unordered_map<std::string_view, const Tensor*> found;
  for (const auto& [name, t] : given) found.emplace(name, &t);
  NamedTensors state = object.state_dict();
  for (auto& [name, t] : state)
    if (const auto match = found.find(name); match != found.end()) t = *match->second;
  return state;
}

void load_parts(const std::string& path, const std::vector<StateRef<Stateful>>& parts, const LoadOptions& options,
                bool with_random_state) {
  check_names("load", parts);
  const Safetensors file = read_safetensors(path, options.map_location);
  const auto names = parts_of(file);
  check(names || parts.size() == 1, "load", "{} holds the state of one object, but {} are to be loaded; load one alone",
        path, parts.size());

  std::vector<NamedTensors> states;
  std::vector<std::string> problems;
  for (const StateRef<Stateful>& part : parts) {
    const std::string name = part.name();
    if (names && std::find(names->begin(), names->end(), name) == names->end()) {
      problems.push_back(fmt::format("{}: the file has only the parts {}", name, fmt::join(*names, ", ")));
      continue;
    }
    const NamedTensors state = names ? part_of(file, name) : file.tensors;
    states.push_back(options.strict ? state : relaxed(*part, state));
    for (const std::string& problem : part->state_problems(states.back()))
      problems.push_back(fmt::format("{}: {}", name, problem));
  }
  RandomState random;
  const bool restore_random = names && with_random_state;
  if (restore_random) random = to_random_state(part_of(file, kRandom), problems);
  check(problems.empty(), "load",
        "{} does not fit, and nothing was changed; make the objects as they were when it was saved:\n  {}", path,
        fmt::format("{}", fmt::join(problems, "\n  ")));

  for (std::size_t i = 0; i < parts.size(); ++i) parts[i]->load_state_dict(states[i]);
  if (restore_random) set_random_state(random);
}

}  // namespace

void save(const StateRef<const Stateful>& object, const std::string& path) {
  write_safetensors(path, object->state_dict(), kFormat);
}

void save(const std::string& path, const std::vector<StateRef<const Stateful>>& parts) {
  check(!parts.empty(), "save", "there is nothing to save to {}; give at least one object", path);
  check_names("save", parts);
  NamedTensors entries;
  std::vector<std::string> names;
  const auto add = [&](const std::string& part, const NamedTensors& state) {
    for (const auto& [name, t] : state) entries.emplace_back(part + "." + name, t);
  };
  for (const auto& part : parts) {
    names.push_back(part.name());
    add(names.back(), part->state_dict());
  }
  add(kRandom, random_tensors());
  auto metadata = kFormat;
  metadata[kPartsKey] = fmt::format("{}", fmt::join(names, ","));
  write_safetensors(path, entries, metadata);
}

void load(const StateRef<Stateful>& object, const std::string& path, const LoadOptions& options) {
  load_parts(path, {object}, options, false);
}

void load(const std::string& path, const std::vector<StateRef<Stateful>>& parts, const LoadOptions& options) {
  check(!parts.empty(), "load", "there is nothing to load from {}; give at least one object", path);
  load_parts(path, parts, options, true);
}

}  // namespace tandem
