// Reads a saved state entry by entry and collects everything that does not fit, so that one error can list it all.
#pragma once
#include <map>
#include <string>
#include <vector>

#include <tandem/tensor/io/state.h>

namespace tandem::optim {

/// A number as an entry of a state.
Tensor number_entry(double value);
Tensor number_entry(int64_t value);

/// Reads entries of a saved state by name, and notes those that are missing or do not fit.
class StateReader {
 public:
  explicit StateReader(const NamedTensors& state);
  bool has(const std::string& name) const { return entries_.contains(name); }
  /// The entry, which must have this shape and type; undefined, with a problem noted, when it is missing or has not.
  Tensor values(const std::string& name, const Shape& shape, DType dtype);
  /// The one float64 in an entry; 0, with a problem noted, when there is none.
  double real(const std::string& name);
  /// The one int64 in an entry, at least `minimum`; `minimum`, with a problem noted, when there is none.
  int64_t integer(const std::string& name, int64_t minimum);
  void note(std::string problem) { problems_.push_back(std::move(problem)); }
  /// All problems, with one for every entry that was never asked for.
  std::vector<std::string> finish();

 private:
  struct Entry {
    Tensor tensor;
    bool used = false;
  };
  std::map<std::string, Entry> entries_;
  std::vector<std::string> problems_;
};

/// Throws Error listing the problems, unless there are none.
void check_fits(const std::string& op, const std::string& what, const std::vector<std::string>& problems);

}  // namespace tandem::optim
