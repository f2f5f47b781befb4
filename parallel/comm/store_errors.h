// What a get throws, in the same words in every store.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include <tandem/parallel/comm/process_group.h>
#include <tandem/parallel/comm/store.h>

namespace tandem::parallel {

CommError keys_missing(const Store& store, double seconds, const std::vector<std::string>& keys);
CommError lost_while_waiting(const Store& store, int rank, std::string_view how, std::string_view key);

}  // namespace tandem::parallel
