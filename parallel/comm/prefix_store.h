// PrefixStore: a part of another store, with names of its own.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include <tandem/parallel/comm/store.h>

namespace tandem::parallel {

/// The keys of another store that begin with `prefix`, which is put before every key. Waits end when a rank is lost, as
/// in the other store; the keys "ended/<rank>" that say so are that store's alone.
class PrefixStore final : public Store {
 public:
  /// Error when there is no store, or the prefix is empty.
  PrefixStore(std::shared_ptr<Store> store, std::string prefix);
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
  std::string full(std::string_view key) const;
  std::shared_ptr<Store> store_;
  std::string prefix_;
};

}  // namespace tandem::parallel
