#include <tandem/parallel/bucket.h>

#include <algorithm>

#include <tandem/tensor/error.h>

namespace tandem::parallel {

std::vector<std::vector<std::size_t>> plan_buckets(std::span<const BucketItem> items,
                                                   std::span<const std::int64_t> caps) {
  check(!caps.empty(), "plan_buckets", "there is no cap; give the size of a bucket in bytes");
  for (const std::int64_t cap : caps)
    check(cap > 0, "plan_buckets", "a bucket of {} bytes was asked for; give a positive number", cap);
  // The bucket of each kind that is being filled.
  struct Open {
    DType dtype;
    Device device;
    std::vector<std::size_t> bucket = {};
    std::int64_t bytes = 0;
    std::size_t closed = 0;  // buckets of this kind
  };
  std::vector<Open> kinds;
  std::vector<std::vector<std::size_t>> plan;
  for (std::size_t i = 0; i < items.size(); ++i) {
    auto open = std::find_if(kinds.begin(), kinds.end(), [&](const Open& kind) {
      return kind.dtype == items[i].dtype && kind.device == items[i].device;
    });
    if (open == kinds.end()) open = kinds.insert(kinds.end(), {items[i].dtype, items[i].device});
    open->bucket.push_back(i);
    open->bytes += items[i].bytes;
    if (open->bytes < caps[std::min(open->closed, caps.size() - 1)]) continue;
    plan.push_back(std::move(open->bucket));
    *open = {.dtype = open->dtype, .device = open->device, .closed = open->closed + 1};
  }
  std::sort(kinds.begin(), kinds.end(), [](const Open& a, const Open& b) {
    return !b.bucket.empty() && (a.bucket.empty() || a.bucket.back() < b.bucket.back());
  });
  for (Open& open : kinds)
    if (!open.bucket.empty()) plan.push_back(std::move(open.bucket));
  return plan;
}

}  // namespace tandem::parallel
