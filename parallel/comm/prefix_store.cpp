#include <tandem/parallel/comm/prefix_store.h>

#include <tandem/parallel/comm/store_limits.h>
#include <tandem/tensor/error.h>

namespace tandem::parallel {

PrefixStore::PrefixStore(std::shared_ptr<Store> store, std::string prefix)
    : store_(std::move(store)), prefix_(std::move(prefix)) {
  tandem::check(store_ != nullptr, "store", "there is no store to put the prefix '{}' before its keys",
                printable(prefix_));
  check_sizes(prefix_, {});
}

std::string PrefixStore::full(std::string_view key) const {
  check_sizes(key, {});
  return prefix_ + std::string(key);
}

void PrefixStore::set(std::string_view key, std::string_view value) { store_->set(full(key), value); }
std::string PrefixStore::get(std::string_view key, std::optional<double> timeout_seconds) {
  return store_->get(full(key), timeout_seconds);
}
bool PrefixStore::check(std::string_view key) { return store_->check(full(key)); }
std::int64_t PrefixStore::add(std::string_view key, std::int64_t amount) { return store_->add(full(key), amount); }
std::string PrefixStore::compare_set(std::string_view key, std::string_view expected, std::string_view desired) {
  return store_->compare_set(full(key), expected, desired);
}
bool PrefixStore::remove(std::string_view key) { return store_->remove(full(key)); }
std::int64_t PrefixStore::num_keys(std::string_view prefix) { return store_->num_keys(prefix_ + std::string(prefix)); }
double PrefixStore::timeout_seconds() const { return store_->timeout_seconds(); }
Store::Names PrefixStore::names() const { return store_->names(); }

}  // namespace tandem::parallel
