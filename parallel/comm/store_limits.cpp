#include <tandem/parallel/comm/store_limits.h>

#include <unistd.h>

#include <algorithm>
#include <charconv>

#include <tandem/tensor/error.h>

namespace tandem::parallel {

std::string launcher_ended_key(int node) { return fmt::format("{}ended/{}", kLauncherPrefix, node); }

void put_length(std::string& out, std::size_t length) {
  for (unsigned i = 0; i < 4; ++i) out += static_cast<char>(length >> 8 * i & 0xff);
}

std::size_t read_length(std::string_view bytes) {
  std::size_t length = 0;
  for (unsigned i = 0; i < 4; ++i) length |= static_cast<std::size_t>(static_cast<unsigned char>(bytes[i])) << 8 * i;
  return length;
}

double usable_timeout(const char* op, double seconds) {
  constexpr double kLongest = 10 * 365 * 86400.0;  // in nanoseconds it still fits into 64 bits
  check(seconds > 0, op, "timeout_seconds is {}; it must be positive", seconds);  // which NaN is not
  return std::min(seconds, kLongest);
}

void check_sizes(std::string_view key, std::string_view value) {
  check(!key.empty(), "store", "the key is empty; give it a name");
  check(key.size() <= kMaxKeyBytes, "store", "the key '{}' has {} bytes; at most {} are allowed", printable(key),
        key.size(), kMaxKeyBytes);
  check(value.size() <= kMaxValueBytes, "store", "the value of '{}' has {} bytes; at most {} are allowed",
        printable(key), value.size(), kMaxValueBytes);
}

std::size_t check_room(std::size_t bytes, std::size_t removed, std::size_t added) {
  const std::size_t after = bytes - removed + added;
  check(after <= kMaxStoreBytes, "store", "the store is full: {} bytes are allowed; remove keys", kMaxStoreBytes);
  return after;
}

void check_process(int made_in) {
  check(getpid() == made_in, "store", "this process was forked from process {}, which made the store; make another one",
        made_in);
}

std::int64_t add_to(std::string_view key, std::string_view value, std::int64_t amount) {
  std::int64_t old = 0, sum = 0;
  if (!value.empty()) {
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), old);
    check(error == std::errc() && end == value.data() + value.size(), "store",
          "the value of '{}' is not a number, so nothing can be added to it", printable(key));
  }
  check(!__builtin_add_overflow(old, amount, &sum), "store", "{} + {} in '{}' is out of range", old, amount,
        printable(key));
  return sum;
}

std::string printable(std::string_view key) {
  constexpr std::size_t kShown = 100;
  std::string text;
  for (const char c : key.substr(0, kShown)) text += c >= ' ' && c <= '~' ? c : '?';
  return key.size() > kShown ? text + "..." : text;
}

std::string who(int rank, int world_size) {
  return rank < 0 ? std::string() : fmt::format("rank {} of {}: ", rank, world_size);
}

}  // namespace tandem::parallel
