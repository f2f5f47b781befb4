#include <tandem/parallel/placement.h>

#include <algorithm>
#include <numeric>

#include <tandem/parallel/reproducible.h>
#include <tandem/tensor/random.h>

namespace tandem::parallel {

std::vector<int64_t> balanced_sizes(int64_t rows, std::size_t parts) {
  const int64_t used = std::clamp<int64_t>(rows, 1, static_cast<int64_t>(parts));
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < used; ++i) sizes.push_back(rows / used + (i < rows % used ? 1 : 0));
  return sizes;
}

Placement::Placement(const nn::Module& module, const DataParallelOptions& options)
    : dim(options.dim), proportion(options.part_sizes), shards(options.reproducible_shards) {
  const std::vector<Tensor> parameters = module.parameters();
  const DeviceType type = parameters.empty() ? DeviceType::cpu : parameters.front().device().type();
  std::vector<Device> distinct;
  for (const DeviceId& id : options.device_ids) distinct.push_back(id.resolve(type));
  if (distinct.empty())
    for (int i = 0; i < device_count(type); ++i) distinct.emplace_back(type, i);
  for (auto device = distinct.begin(); device != distinct.end(); ++device) {
    check_exists("DataParallel", *device);
    check(std::find(distinct.begin(), device, *device) == device, "DataParallel",
          "{} is listed twice in device_ids; for several replicas on a device set `replicas`", *device);
  }
  check(options.replicas >= 0 && options.replicas <= kMaxStreams, "DataParallel",
        "replicas is {}; give 1 to {}, or 0 for one a device", options.replicas, kMaxStreams);
  if (shards != 0) {
    check_shards("DataParallel", shards, static_cast<int>(distinct.size()), "devices");
    check(options.replicas == 0 && options.part_sizes.empty() && options.dim == 0, "DataParallel",
          "reproducible_shards says what the parts are; leave out replicas, part_sizes and dim");
  }
  const int wanted = shards != 0 ? shards : options.replicas;
  const std::size_t count = wanted == 0 ? distinct.size() : static_cast<std::size_t>(wanted);
  for (std::size_t i = 0; i < count; ++i) devices.push_back(distinct[i % distinct.size()]);
  output_device = options.output_device.is_default() ? distinct.front() : options.output_device.resolve(type);
  check_exists("DataParallel", output_device);
  if (proportion.empty()) return;
  check(proportion.size() == count, "DataParallel", "part_sizes has {} entries for {} replicas; give one a replica",
        proportion.size(), count);
  for (const int64_t part : proportion)
    check(part >= 0 && part <= INT32_MAX, "DataParallel", "part_sizes has {}; a part has 0 to {} rows", part,
          INT32_MAX);
  check(std::accumulate(proportion.begin(), proportion.end(), int64_t{0}) > 0, "DataParallel",
        "part_sizes are all 0, so no replica would get anything");
}

std::vector<int64_t> Placement::sizes(int64_t rows) const {
  if (proportion.empty()) return balanced_sizes(rows, devices.size());
  const int64_t total = std::accumulate(proportion.begin(), proportion.end(), int64_t{0});
  std::vector<int64_t> sizes, rests;
  int64_t left = rows;
  for (const int64_t part : proportion) {
    // rows * part / total without overflow.
    sizes.push_back(rows / total * part + rows % total * part / total);
    rests.push_back(rows % total * part % total);
    left -= sizes.back();
  }
  // The rows that rounding left over go to the parts that lost most.
  for (; left > 0; --left) {
    const auto most = std::max_element(rests.begin(), rests.end());
    ++sizes[static_cast<std::size_t>(most - rests.begin())];
    *most = -1;
  }
  return sizes;
}

}  // namespace tandem::parallel
