#include <tandem/parallel/comm/hash_store.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>

#include <tandem/parallel/comm/clock.h>
#include <tandem/parallel/comm/store_errors.h>
#include <tandem/parallel/comm/store_limits.h>

namespace tandem::parallel {
struct HashStore::State {
  double timeout_seconds;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::string, std::less<>> values;
  std::size_t bytes = 0;  // of keys and values

  void put(std::string_view key, std::string_view value) {
    const auto found = values.find(key);
    const std::size_t before = found == values.end() ? 0 : key.size() + found->second.size();
    bytes = check_room(bytes, before, key.size() + value.size());
    values[std::string(key)] = value;
    changed.notify_all();
  }
};

HashStore::HashStore(double timeout_seconds) : state_(std::make_unique<State>()) {
  state_->timeout_seconds = usable_timeout("store", timeout_seconds);
}
HashStore::~HashStore() = default;

void HashStore::set(std::string_view key, std::string_view value) {
  check_sizes(key, value);
  const std::lock_guard lock(state_->mutex);
  state_->put(key, value);
}

std::string HashStore::get(std::string_view key, std::optional<double> timeout_seconds) {
  check_sizes(key, {});
  const double seconds = usable_timeout("store", timeout_seconds.value_or(state_->timeout_seconds));
  std::unique_lock lock(state_->mutex);
  const auto limit = std::chrono::steady_clock::now() + clock_ticks(seconds);
  auto ended = state_->values.end();
  const auto decided = [&] {
    ended = state_->values.lower_bound(kEndedPrefix);
    if (ended != state_->values.end() && !ended->first.starts_with(kEndedPrefix)) ended = state_->values.end();
    return state_->values.find(key) != state_->values.end() || ended != state_->values.end();
  };
  const bool in_time = state_->changed.wait_until(lock, limit, decided);
  if (const auto found = state_->values.find(key); found != state_->values.end()) return found->second;
  if (!in_time) throw keys_missing(*this, seconds, {std::string(key)});
  const std::string who = ended->first.substr(kEndedPrefix.size());
  throw lost_while_waiting(*this, std::atoi(who.c_str()), ended->second, key);
}

bool HashStore::check(std::string_view key) {
  check_sizes(key, {});
  const std::lock_guard lock(state_->mutex);
  return state_->values.find(key) != state_->values.end();
}

std::int64_t HashStore::add(std::string_view key, std::int64_t amount) {
  check_sizes(key, {});
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->values.find(key);
  const std::int64_t sum = add_to(key, found == state_->values.end() ? std::string_view() : found->second, amount);
  state_->put(key, std::to_string(sum));
  return sum;
}

std::string HashStore::compare_set(std::string_view key, std::string_view expected, std::string_view desired) {
  check_sizes(key, expected);
  check_sizes(key, desired);
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->values.find(key);
  std::string value = found == state_->values.end() ? std::string() : found->second;
  if (value != expected) return value;
  state_->put(key, desired);
  return std::string(desired);
}

bool HashStore::remove(std::string_view key) {
  check_sizes(key, {});
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->values.find(key);
  if (found == state_->values.end()) return false;
  state_->bytes -= key.size() + found->second.size();
  state_->values.erase(found);
  return true;
}

std::int64_t HashStore::num_keys(std::string_view prefix) {
  if (!prefix.empty()) check_sizes(prefix, {});
  const std::lock_guard lock(state_->mutex);
  return std::count_if(state_->values.begin(), state_->values.end(),
                       [&](const auto& entry) { return entry.first.starts_with(prefix); });
}

double HashStore::timeout_seconds() const { return state_->timeout_seconds; }
Store::Names HashStore::names() const { return {"", "the store"}; }

}  // namespace tandem::parallel
