// Store: the small dictionary through which ranks find each other.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::parallel {

/// Keys and values that all ranks of a job see. Keys and values are any bytes, at most 1 KiB and 8 MiB; a store holds
/// at most 256 MiB. Calls throw Error for what is beyond that, and CommError when the store is lost.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(std::string_view key, std::string_view value) = 0;
  /// The value of a key; waits until it is there. CommError when it does not come within so many seconds, those of the
  /// store unless given, and at once when a rank is lost.
  virtual std::string get(std::string_view key, std::optional<double> timeout_seconds = {}) = 0;
  /// Waits until all keys are there; in time for all of them, or CommError names those that did not come.
  void wait(const std::vector<std::string>& keys, std::optional<double> timeout_seconds = {});
  /// Whether the key is there now.
  virtual bool check(std::string_view key) = 0;
  /// Adds to a number, which begins at 0, and returns the sum. Its value as text is what get returns.
  virtual std::int64_t add(std::string_view key, std::int64_t amount) = 0;
  /// Sets the key to `desired` if its value is `expected` (or if it is missing and `expected` is empty); returns the
  /// value that it has then.
  virtual std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired) = 0;
  /// Deletes a key; false when there was none.
  virtual bool remove(std::string_view key) = 0;
  /// How many keys begin with `prefix`.
  virtual std::int64_t num_keys(std::string_view prefix = {}) = 0;
  /// How long get and wait wait unless told otherwise.
  virtual double timeout_seconds() const = 0;
  /// How messages begin, such as "rank 1 of 4: " or nothing, and what they call the store, such as "the store at
  /// 127.0.0.1:29500".
  struct Names {
    std::string asker = {}, store = {};
  };
  virtual Names names() const = 0;
};

}  // namespace tandem::parallel
