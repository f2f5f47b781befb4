#include <tandem/parallel/comm/store_errors.h>

#include <fmt/format.h>

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

}  // namespace tandem::parallel
