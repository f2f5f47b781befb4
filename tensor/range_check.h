// Labels and indices that must lie in a range, and the sentence about one that does not: on the CPU it is thrown before
// the operation, on a CUDA device a kernel notes it, and the host throws it when it next waits for the device.
#pragma once
#include <cstdint>

#include <tandem/tensor/compiler.h>
#include <tandem/tensor/error.h>

namespace tandem {

/// Who reads the numbers.
enum class RangeUser : std::int32_t { cross_entropy, nll_loss, index_select, gather, one_hot };

/// Every number must lie in [0, limit), or be `ignored` where a loss reads them.
struct RangeCheck {
  RangeUser user;
  std::int64_t limit = 0;
  std::int64_t ignored = 0;

  TANDEM_HD bool of_labels() const { return user == RangeUser::cross_entropy || user == RangeUser::nll_loss; }
  TANDEM_HD bool good(std::int64_t number) const {
    return (number >= 0 && number < limit) || (of_labels() && number == ignored);
  }
};

/// Throws the Error for the number at `position`.
[[noreturn]] inline void fail_range(const RangeCheck& check, std::int64_t number, std::int64_t position) {
  constexpr const char* kNames[] = {"cross_entropy", "nll_loss", "index_select", "gather", "one_hot"};
  const char* const op = kNames[static_cast<int>(check.user)];
  if (check.user == RangeUser::cross_entropy)
    fail(op,
         "label {} at row {} is out of range: the logits have {} classes, so labels run from 0 to {} (or are "
         "ignore_index, {})",
         number, position, check.limit, check.limit - 1, check.ignored);
  if (check.user == RangeUser::nll_loss)
    fail(op, "label {} at row {} is out of range: there are {} classes, so labels run from 0 to {}", number, position,
         check.limit, check.limit - 1);
  if (check.limit == 0) fail(op, "the dimension that index {} selects from is empty; give an empty index", number);
  fail(op, "index {} is out of range 0 to {}", number, check.limit - 1);
}

}  // namespace tandem
