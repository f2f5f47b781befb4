// HashStore: the store of ranks that are threads of one process.
#pragma once
#include <memory>

#include <tandem/parallel/comm/store.h>

namespace tandem::parallel {

/// A dictionary in this process's memory, used by any number of threads. Once a rank is known to have ended (there is a
/// key "ended/<rank>"), get no longer waits: it throws CommError about that rank.
class HashStore final : public Store {
 public:
  /// `timeout_seconds` is for each key that get waits for.
  explicit HashStore(double timeout_seconds = 30);
  ~HashStore() override;
  HashStore(const HashStore&) = delete;
  HashStore& operator=(const HashStore&) = delete;
  void set(std::string_view key, std::string_view value) override;
  std::string get(std::string_view key, std::optional<double> timeout_seconds = {}) override;
  bool check(std::string_view key) override;
  std::int64_t add(std::string_view key, std::int64_t amount) override;
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired) override;
  bool remove(std::string_view key) override;
  std::int64_t num_keys(std::string_view prefix = {}) override;
  double timeout_seconds() const override;
  Names names() const override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem::parallel
