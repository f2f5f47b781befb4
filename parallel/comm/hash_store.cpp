#include <tandem/parallel/comm/hash_store.h>

#include <chrono>
#include <cstdlib>

#include <tandem/parallel/comm/process_group.h>
#include <tandem/parallel/comm/store_limits.h>

namespace tandem::parallel {
namespace {

constexpr std::string_view kEnded = "ended/";

}  // namespace

void HashStore::set(std::string_view key, std::string_view value) {
  check_sizes(key, value);
  const std::lock_guard lock(mutex_);
  values_[std::string(key)] = value;
  changed_.notify_all();
}

std::string HashStore::get(std::string_view key) {
  std::unique_lock lock(mutex_);
  const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_seconds_);
  auto ended = values_.end();
  const auto decided = [&] {
    ended = values_.lower_bound(kEnded);
    if (ended != values_.end() && !ended->first.starts_with(kEnded)) ended = values_.end();
    return values_.find(key) != values_.end() || ended != values_.end();
  };
  const bool in_time =
      changed_.wait_until(lock, std::chrono::time_point_cast<std::chrono::steady_clock::duration>(limit), decided);
  if (const auto found = values_.find(key); found != values_.end()) return found->second;
  if (!in_time)
    throw CommError(-1, fmt::format("waited {} s for the key '{}' in the store; no rank has set it", timeout_seconds_,
                                    printable(key)));
  const std::string who = ended->first.substr(kEnded.size());
  throw CommError(std::atoi(who.c_str()), fmt::format("rank {} {} while this rank waited for the key '{}' in the store",
                                                      who, ended->second, printable(key)));
}

bool HashStore::check(std::string_view key) {
  const std::lock_guard lock(mutex_);
  return values_.find(key) != values_.end();
}

std::int64_t HashStore::add(std::string_view key, std::int64_t amount) {
  check_sizes(key, {});
  const std::lock_guard lock(mutex_);
  const auto found = values_.find(key);
  const std::int64_t sum = add_to(key, found == values_.end() ? std::string_view() : found->second, amount);
  values_[std::string(key)] = std::to_string(sum);
  changed_.notify_all();
  return sum;
}

std::string HashStore::compare_set(std::string_view key, std::string_view expected, std::string_view desired) {
  check_sizes(key, desired);
  const std::lock_guard lock(mutex_);
  const auto found = values_.find(key);
  if (found == values_.end() && !expected.empty()) return {};
  std::string& value = values_[std::string(key)];
  if (found != values_.end() && value != expected) return value;
  value = desired;
  changed_.notify_all();
  return value;
}

bool HashStore::remove(std::string_view key) {
  const std::lock_guard lock(mutex_);
  const auto found = values_.find(key);
  if (found == values_.end()) return false;
  values_.erase(found);
  return true;
}

std::int64_t HashStore::num_keys() {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(values_.size());
}

}  // namespace tandem::parallel
