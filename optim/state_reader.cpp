// Checks of single entries; the sentences that users read when a state does not fit.
#include <tandem/optim/state_reader.h>

#include <tandem/tensor/create.h>

namespace tandem::optim {

Tensor number_entry(double value) { return full({}, value, {.dtype = float64}); }
Tensor number_entry(int64_t value) { return full({}, value, {.dtype = int64}); }

StateReader::StateReader(const NamedTensors& state) {
  for (const auto& [name, tensor] : state) {
    if (!tensor.defined())
      note(fmt::format("{} is undefined", name));
    else if (!entries_.try_emplace(name, Entry{tensor}).second)
      note(fmt::format("{} is there twice", name));
  }
}

Tensor StateReader::values(const std::string& name, const Shape& shape, DType dtype) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    note(fmt::format("{} is missing", name));
    return {};
  }
  found->second.used = true;
  const Tensor& t = found->second.tensor;
  if (t.shape() == shape && t.dtype() == dtype) return t.detach();
  note(fmt::format("{} is {} {}, but {} {} is needed", name, t.dtype(), t.shape(), dtype, shape));
  return {};
}

double StateReader::real(const std::string& name) {
  const Tensor t = values(name, {}, float64);
  return t.defined() ? t.item<double>() : 0;
}

int64_t StateReader::integer(const std::string& name, int64_t minimum) {
  const Tensor t = values(name, {}, int64);
  if (!t.defined()) return minimum;
  const int64_t value = t.item<int64_t>();
  if (value >= minimum) return value;
  note(fmt::format("{} is {}, but at least {} is needed", name, value, minimum));
  return minimum;
}

std::vector<std::string> StateReader::finish() {
  for (const auto& [name, entry] : entries_)
    if (!entry.used) note(fmt::format("{} is not known here", name));
  return std::move(problems_);
}

void check_fits(const std::string& op, const std::string& what, const std::vector<std::string>& problems) {
  if (problems.empty()) return;
  std::string list;
  for (const std::string& problem : problems) list += "\n  " + problem;
  fail(op, "the state does not fit; load one that was saved from {}:{}", what, list);
}

}  // namespace tandem::optim
