// A module's state: comparing a state dictionary with the model, and loading it as a whole or not at all.
#include <unordered_map>

#include <tandem/autograd/functions.h>
#include <tandem/autograd/grad_mode.h>
#include <tandem/nn/module.h>

namespace tandem::nn {

// What keeps a state from being loaded; `names` holds missing and unexpected entries, which loading may pass over.
struct Module::Mismatches {
  std::vector<std::string> names, contents;
  std::vector<std::pair<Tensor, Tensor>> copies;  // to the model, from the state
};

NamedTensors Module::state_dict() const {
  NamedTensors out;
  for (const auto& [prefix, module] : every_module())
    for (const auto* kind : {&module->parameters_, &module->buffers_})
      for (const auto& [name, tensor] : *kind) out.emplace_back(prefix.empty() ? name : prefix + '.' + name, tensor);
  return out;
}

Module::Mismatches Module::compare(const NamedTensors& state) const {
  Mismatches found;
  std::unordered_map<std::string, Tensor> given;
  for (const auto& [name, tensor] : state) {
    if (!tensor.defined()) found.contents.push_back(fmt::format("undefined: '{}' has no tensor", name));
    if (!given.emplace(name, tensor).second) found.contents.push_back(fmt::format("repeated: '{}'", name));
  }
  struct Use {
    std::string name;  // the first by which the tensor was given
    Tensor source;
  };
  const NamedTensors mine = state_dict();
  std::unordered_map<const void*, Use> used;
  std::unordered_map<std::string, bool> known;
  for (const auto& [name, tensor] : mine) {
    known.emplace(name, true);
    const auto entry = given.find(name);
    if (entry == given.end() || !entry->second.defined()) continue;
    const Tensor& source = entry->second;
    const auto [use, first] = used.emplace(tensor.identity().get(), Use{name, source});
    if (source.shape() != tensor.shape())
      found.contents.push_back(
          fmt::format("shape of '{}': file has {}, model has {}", name, source.shape(), tensor.shape()));
    else if (source.dtype() != tensor.dtype())
      found.contents.push_back(fmt::format("dtype of '{}': file has {}, model has {}; convert it with .to({})", name,
                                           source.dtype(), tensor.dtype(), tensor.dtype()));
    else if (first)
      found.copies.emplace_back(tensor, source);
    else if (const Tensor& other = use->second.source;
             other.identity() != source.identity() && !equal(other.to(Device()), source.to(Device())))
      found.contents.push_back(
          fmt::format("values of '{}' and '{}' differ, but in the model they are one tensor", use->second.name, name));
  }
  for (const auto& [name, tensor] : mine)
    if (given.find(name) == given.end() && used.find(tensor.identity().get()) == used.end())
      found.names.push_back(fmt::format("missing: '{}' {} {}", name, tensor.dtype(), tensor.shape()));
  for (const auto& [name, tensor] : state)
    if (known.find(name) == known.end()) found.names.push_back(fmt::format("unexpected: '{}'", name));
  return found;
}

std::vector<std::string> Module::state_problems(const NamedTensors& state) const {
  Mismatches found = compare(state);
  std::vector<std::string> problems = std::move(found.names);
  for (std::string& text : found.contents) problems.push_back(std::move(text));
  return problems;
}

std::vector<std::string> Module::load_state_dict(const NamedTensors& state, bool strict) {
  Mismatches found = compare(state);
  if (!found.contents.empty() || (strict && !found.names.empty())) {
    std::string list;
    for (const auto* texts : {&found.names, &found.contents})
      for (const std::string& text : *texts) list += "\n  " + text;
    fail("load_state_dict", "the state does not fit {}, which is unchanged:{}{}", name(), list,
         strict && found.contents.empty() ? "\nTo load what fits, pass strict = false."
                                          : "\nLoad the state of the same model.");
  }
  const NoGradGuard no_grad;
  for (auto& [target, source] : found.copies) target.copy_(source);
  return std::move(found.names);
}

}  // namespace tandem::nn
