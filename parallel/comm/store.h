// Store: the small dictionary through which ranks find each other.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace tandem::parallel {

/// Keys and values that all ranks of a job see. Keys and values are any bytes. Calls throw CommError when the store is
/// lost, and when a key does not come within the timeout.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(std::string_view key, std::string_view value) = 0;
  /// The value of a key; waits until it is there.
  virtual std::string get(std::string_view key) = 0;
  /// Whether the key is there now.
  virtual bool check(std::string_view key) = 0;
  /// Adds to a number, which begins at 0, and returns the sum. Its value as text is what get returns.
  virtual std::int64_t add(std::string_view key, std::int64_t amount) = 0;
  /// Sets the key to `desired` if its value is `expected` (or if it is missing and `expected` is empty); returns the
  /// value that it has then.
  virtual std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired) = 0;
  /// Deletes a key; false when there was none.
  virtual bool remove(std::string_view key) = 0;
  virtual std::int64_t num_keys() = 0;
};

}  // namespace tandem::parallel
