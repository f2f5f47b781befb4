// The bucket plan: which gradients travel together.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <tandem/tensor/device.h>
#include <tandem/tensor/dtype.h>

namespace tandem::parallel {

/// What the plan needs to know of a gradient.
struct BucketItem {
  std::int64_t bytes = 0;
  DType dtype = float32;
  Device device = {};
};

/// Numbers of items, by bucket. Items are taken in their order; a bucket is closed once its size reaches the cap, so
/// that it may pass it by one item. A bucket holds one dtype on one device; for each such kind the caps, in bytes, are
/// used one after the other, and the last of them for all that follow. Buckets come in the order in which they are
/// complete. Throws Error when there is no cap or one is not positive.
std::vector<std::vector<std::size_t>> plan_buckets(std::span<const BucketItem> items,
                                                   std::span<const std::int64_t> caps);

}  // namespace tandem::parallel
