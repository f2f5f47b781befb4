#include <tandem/parallel/scatter_gather.h>

#include <tandem/autograd/functions.h>
#include <tandem/parallel/on_device.h>
#include <tandem/parallel/replicas.h>

namespace tandem::parallel {
namespace {

std::vector<Device> resolve(const DeviceIds& ids, DeviceType type) {
  std::vector<Device> devices;
  for (const DeviceId& id : ids) devices.push_back(id.resolve(type));
  return devices;
}

}  // namespace

std::vector<Tensor> scatter(const Tensor& x, const DeviceIds& device_ids, int64_t dim, std::span<const int64_t> sizes) {
  const std::vector<Device> devices = resolve(device_ids, x.device().type());
  check(!devices.empty(), "scatter", "the list of devices is empty; give at least one");
  for (const Device device : devices) check_exists("scatter", device);
  check(x.dim() > 0, "scatter", "a single number cannot be divided; give every module its own copy");
  std::vector<int64_t> balanced;
  if (sizes.empty()) {
    balanced = balanced_sizes(x.size(dim), devices.size());
    sizes = balanced;
  }
  check(sizes.size() <= devices.size(), "scatter", "there are {} sizes for {} devices", sizes.size(), devices.size());
  std::vector<Tensor> parts;
  int64_t start = 0;
  for (const int64_t size : sizes) {
    check(size >= 0, "scatter", "size {} is negative", size);
    start += size;
  }
  check(start == x.size(dim), "scatter", "the sizes sum to {}, but dimension {} of {} has {}", start, dim, x.shape(),
        x.size(dim));
  start = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    parts.push_back(on_device(x.narrow(dim, start, sizes[i]), devices[i]));
    start += sizes[i];
  }
  return parts;
}

std::vector<std::vector<Tensor>> scatter(std::span<const Tensor> inputs, const DeviceIds& devices, int64_t dim,
                                         std::span<const int64_t> sizes) {
  check(!inputs.empty(), "scatter", "there are no tensors to divide");
  std::vector<std::vector<Tensor>> parts;
  for (const Tensor& input : inputs) {
    check(input.dim() > 0 && inputs.front().dim() > 0, "scatter",
          "a single number cannot be divided; keep it in the module");
    check(input.size(dim) == inputs.front().size(dim), "scatter",
          "the tensors differ in size along dimension {}: {} and {}", dim, inputs.front().shape(), input.shape());
    std::vector<Tensor> cut = scatter(input, devices, dim, sizes);
    parts.resize(cut.size());
    for (std::size_t i = 0; i < cut.size(); ++i) parts[i].push_back(std::move(cut[i]));
  }
  return parts;
}

std::vector<std::vector<Tensor>> scatter(std::span<const Tensor> inputs, const Placement& placement) {
  check(!inputs.empty() && inputs.front().dim() > 0, "DataParallel",
        "the first input must be a tensor with rows to divide");
  const int64_t rows = inputs.front().size(placement.dim);
  const std::vector<int64_t> sizes = placement.sizes(rows);
  auto parts = scatter(inputs, placement.devices, placement.dim, sizes);
  for (std::size_t i = 0; i < parts.size(); ++i)
    if (sizes[i] == 0 && (i > 0 || rows > 0)) parts[i].clear();
  return parts;
}

std::shared_ptr<Replicas> replicate(std::shared_ptr<nn::Module> module, const DeviceIds& devices) {
  check(module != nullptr, "replicate", "the module is empty; make it first, as in std::make_shared<Net>()");
  const std::vector<Tensor> parameters = module->parameters();
  const DeviceType type = parameters.empty() ? DeviceType::cpu : parameters.front().device().type();
  return std::make_shared<Replicas>(std::move(module), resolve(devices, type));
}

std::vector<std::vector<Tensor>> parallel_apply(Replicas& replicas, std::span<const std::vector<Tensor>> inputs) {
  check(inputs.size() <= replicas.devices().size(), "parallel_apply", "there are inputs for {} replicas, but only {}",
        inputs.size(), replicas.devices().size());
  replicas.refresh();
  std::vector<std::vector<Tensor>> results(inputs.size());
  replicas.run(inputs.size(), [&](std::size_t i) {
    if (inputs[i].empty()) return;
    results[i] = replicas.module().forward_all(inputs[i]);
    for (Tensor& y : results[i])
      if (y.defined()) y = replicas.listen(y);
  });
  return results;
}

Tensor gather(std::span<const Tensor> parts, Device device, int64_t dim) {
  check(!parts.empty(), "gather", "there are no tensors to join");
  check_exists("gather", device);
  std::vector<Tensor> here;
  for (const Tensor& part : parts) {
    check(part.defined() == parts.front().defined(), "gather",
          "some parts are undefined and others are not; a module must return the same for every part");
    if (!part.defined()) continue;
    const Tensor moved = on_device(part, device);
    here.push_back(moved.dim() == 0 ? moved.view({1}) : moved);
  }
  if (here.empty()) return {};
  if (here.size() == 1 && parts.front().device() == device) return here.front();
  return cat(here, here.front().dim() == 1 ? 0 : dim);
}

std::vector<Tensor> gather(std::span<const std::vector<Tensor>> results, Device device, int64_t dim) {
  std::vector<Tensor> joined;
  const std::vector<Tensor>* first = nullptr;
  for (const auto& result : results) {
    if (result.empty()) continue;  // a replica that was left out
    if (first == nullptr) first = &result;
    check(result.size() == first->size(), "gather", "replicas returned {} and {} tensors", first->size(),
          result.size());
  }
  for (std::size_t k = 0; first != nullptr && k < first->size(); ++k) {
    std::vector<Tensor> parts;
    for (const auto& result : results)
      if (!result.empty()) parts.push_back(result[k]);
    joined.push_back(gather(parts, device, dim));
  }
  return joined;
}

std::vector<Tensor> data_parallel(std::shared_ptr<nn::Module> module, std::span<const Tensor> inputs,
                                  const DataParallelOptions& options) {
  check(module != nullptr, "data_parallel", "the module is empty; make it first, as in std::make_shared<Net>()");
  check(options.reproducible_shards == 0, "data_parallel",
        "reproducible_shards needs a DataParallel, whose loss knows the parts of a batch");
  const Placement placement(*module, options);
  const auto replicas = replicate(std::move(module), placement.devices);
  return gather(parallel_apply(*replicas, scatter(inputs, placement)), placement.output_device, placement.dim);
}

Tensor data_parallel(std::shared_ptr<nn::Module> module, const Tensor& x, const DataParallelOptions& options) {
  std::vector<Tensor> outputs = data_parallel(std::move(module), {&x, 1}, options);
  check(outputs.size() == 1, "data_parallel",
        "the module returned {} tensors where one is needed; give the inputs as a list", outputs.size());
  return std::move(outputs.front());
}

}  // namespace tandem::parallel
