#include <tandem/parallel/comm/store.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include <tandem/parallel/comm/store_errors.h>
#include <tandem/parallel/comm/store_limits.h>

namespace tandem::parallel {

void Store::wait(const std::vector<std::string>& keys, std::optional<double> timeout_seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr double kLast = 0.001;  // for a key whose turn comes when the time is over
  const double seconds = usable_timeout("store", timeout_seconds.value_or(this->timeout_seconds()));
  const auto begin = Clock::now();
  for (auto key = keys.begin(); key != keys.end(); ++key) {
    if (check(*key)) continue;
    try {
      (void)get(*key, std::max(kLast, seconds - std::chrono::duration<double>(Clock::now() - begin).count()));
    } catch (const CommError& e) {
      if (e.rank() >= 0) throw;
      std::vector<std::string> missing;
      std::copy_if(key, keys.end(), std::back_inserter(missing), [this](const std::string& k) { return !check(k); });
      if (!missing.empty()) throw keys_missing(*this, seconds, missing);
      return;
    }
  }
}

}  // namespace tandem::parallel
