// Checks that all settings have in common.
#include <tandem/optim/settings.h>

#include <cmath>

#include <fmt/core.h>

namespace tandem::optim {

std::vector<double> values_of(const Settings& settings) {
  std::vector<double> values;
  for (const auto& setting : settings) values.push_back(setting.second);
  return values;
}

std::string range_problem(const Settings& settings) {
  for (const auto& [name, value] : settings)
    if (!(value >= 0 && std::isfinite(value)))
      return fmt::format("{} is {}; it must be a finite number that is not negative", name, value);
  return {};
}

}  // namespace tandem::optim
