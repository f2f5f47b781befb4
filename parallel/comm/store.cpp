#include <tandem/parallel/comm/store.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include <fmt/format.h>

#include <tandem/parallel/comm/store_errors.h>
#include <tandem/parallel/comm/store_limits.h>

namespace tandem::parallel {

CommError keys_missing(const Store& store, double seconds, const std::vector<std::string>& keys) {
  std::vector<std::string> quoted;
  for (const std::string& key : keys) quoted.push_back(fmt::format("'{}'", printable(key)));
  const Store::Names names = store.names();
  return {-1, fmt::format("{}waited {} s for the key{} {} in {}; no rank has set {}", names.asker, seconds,
                          keys.size() == 1 ? "" : "s", fmt::join(quoted, " and "), names.store,
                          keys.size() == 1 ? "it" : "them")};
}

CommError lost_while_waiting(const Store& store, int rank, std::string_view how, std::string_view key) {
  const Store::Names names = store.names();
  return {rank, fmt::format("{}rank {} {} while this rank waited for the key '{}' in {}", names.asker, rank, how,
                            printable(key), names.store)};
}

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
