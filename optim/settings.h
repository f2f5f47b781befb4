// The numbers that govern an optimizer or a schedule, by name, so that checking, saving and loading them is written
// once.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace tandem::optim {

/// Names and values in a fixed order; a flag is 0 or 1.
using Settings = std::vector<std::pair<std::string, double>>;

/// The values alone.
std::vector<double> values_of(const Settings& settings);
/// A sentence on the first value that is negative or not finite; empty when there is none.
std::string range_problem(const Settings& settings);

}  // namespace tandem::optim
