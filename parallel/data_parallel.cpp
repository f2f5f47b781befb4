#include <tandem/parallel/data_parallel.h>

#include <algorithm>
#include <mutex>

#include <tandem/autograd/engine.h>
#include <tandem/autograd/node.h>
#include <tandem/parallel/backward_end.h>
#include <tandem/tensor/backend.h>
#include <tandem/tensor/random.h>
#include <tandem/tensor/threads.h>

namespace tandem::parallel {
namespace {

// The tensor's values on another device, without history. CPU devices share memory, so nothing moves between them.
Tensor on_device(const Tensor& t, Device device) {
  const auto& impl = t.impl();
  if (t.device() == device) return t.detach();
  if (!t.device().is_cpu() || !device.is_cpu()) return t.detach().to(device);
  return make_view(std::make_shared<Storage>(impl->storage, device), impl->offset, impl->shape, impl->strides,
                   impl->dtype);
}

// Sizes of at most `parts` parts that differ by at most one.
std::vector<int64_t> balanced_sizes(int64_t rows, std::size_t parts) {
  const auto n = static_cast<int64_t>(parts);
  const int64_t used = std::clamp<int64_t>(rows, 1, n);
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < used; ++i) sizes.push_back(rows * (i + 1) / used - rows * i / used);
  std::sort(sizes.rbegin(), sizes.rend());
  return sizes;
}

}  // namespace

// Shared with the graph: a backward may come after the wrapper is gone.
struct DataParallel::State final : BackwardListener {
  struct Entry {
    Tensor master;
    bool is_parameter;
    std::vector<Tensor> replicas;  // replica i on device i
    std::shared_ptr<const ReplicaSet> set;
    std::shared_ptr<Storage> storage;  // of the master when the replicas were made
    std::uint32_t version = 0;         // of a buffer when it was copied
  };

  std::shared_ptr<nn::Module> module;
  std::vector<Device> devices;
  Device output_device;
  int dim = 0;
  std::vector<Entry> entries;
  std::mutex mutex;  // of the entries, which several threads may bring up to date

  void bind(Entry& entry) {
    entry.storage = entry.master.identity()->storage;
    entry.version = entry.master.version();
    entry.replicas.clear();
    auto set = std::make_shared<ReplicaSet>();
    set->owner = this;
    for (std::size_t i = 0; i < devices.size(); ++i) {
      // A parameter is read by all replicas and shares the master's memory where it can. A buffer is written by
      // forward: replica 0 writes the master's, the others have copies.
      Tensor replica = on_device(entry.master, devices[i]);
      if (!entry.is_parameter && i > 0) replica = replica.clone();
      entry.replicas.push_back(replica);
      set->replicas.push_back(replica.identity());
    }
    entry.set = std::move(set);
  }

  // Brings every replica up to the master's values and settings.
  void replicate() {
    const NoGradGuard no_grad;
    const std::lock_guard lock(mutex);
    for (Entry& entry : entries) {
      TensorImpl& master = *entry.master.identity();
      if (entry.storage != master.storage) bind(entry);
      if (master.replicas != entry.set) master.replicas = entry.set;  // another wrapper may have put its own
      if (!entry.is_parameter && entry.version != entry.master.version()) {
        for (std::size_t i = 1; i < devices.size(); ++i) entry.replicas[i].copy_(on_device(entry.master, devices[i]));
        entry.version = entry.master.version();
      }
      for (Tensor& replica : entry.replicas)
        if (replica.requires_grad() != entry.master.requires_grad())
          replica.requires_grad_(entry.master.requires_grad());
    }
  }

  // The parts of a tensor on their devices.
  std::vector<Tensor> scatter(const Tensor& x, const std::vector<int64_t>& sizes) const {
    std::vector<Tensor> parts = x.split(sizes, dim);
    for (std::size_t i = 0; i < parts.size(); ++i)
      parts[i] = grad_enabled() && x.requires_grad() ? parts[i].to(devices[i]) : on_device(parts[i], devices[i]);
    return parts;
  }

  // Calls body(i) for the first `count` replicas, each on its device's thread, which records if the caller does.
  template <class Body>
  void for_each_replica(std::size_t count, const Body& body) {
    run_on_devices(std::span(devices).first(count), [&](int i) {
      const ReplicaScope replica(this, i);
      const RandomStream stream(i);
      try {
        body(static_cast<std::size_t>(i));
      } catch (const std::exception& e) {
        throw Error(fmt::format("replica {} on {}: {}", i, devices[static_cast<std::size_t>(i)], e.what()));
      }
    });
  }

  // Drops what a backward that threw has left behind.
  void abandon() override {
    for (Entry& entry : entries)
      for (Tensor& replica : entry.replicas)
        if (replica.grad().defined()) replica.set_grad({});
  }

  // Adds the replicas' gradients to the masters', in a fixed order.
  void end() override {
    const NoGradGuard no_grad;
    for (Entry& entry : entries) {
      if (!entry.is_parameter || !entry.master.requires_grad()) continue;
      Tensor total;
      for (Tensor& replica : entry.replicas) {
        const autograd::Meta* meta = autograd::meta_of(replica);
        const Tensor g = meta != nullptr && meta->leaf ? meta->leaf->take_grad() : Tensor();
        if (!g.defined()) continue;
        if (total.defined())
          total.add_(on_device(g, total.device()));
        else
          total = g;
      }
      if (!total.defined()) continue;
      if (total.device() != entry.master.device()) total = on_device(total, entry.master.device());
      autograd::accumulate_grad(entry.master, std::move(total));
    }
  }
};

DataParallel::DataParallel(std::shared_ptr<nn::Module> module, const DataParallelOptions& options)
    : state_(std::make_shared<State>()) {
  check(module != nullptr, "DataParallel", "the module is empty; make it first, as in std::make_shared<Net>()");
  for (const nn::Module* part : module->modules())
    check(dynamic_cast<const DataParallel*>(part) == nullptr, "DataParallel",
          "the module contains a DataParallel already; wrap the whole model once");
  const std::vector<Tensor> parameters = module->parameters();
  const DeviceType type = parameters.empty() ? DeviceType::cpu : parameters.front().device().type();
  for (const DeviceId& id : options.device_ids) state_->devices.push_back(id.resolve(type));
  if (state_->devices.empty())
    for (int i = 0; i < device_count(type); ++i) state_->devices.emplace_back(type, i);
  for (std::size_t i = 0; i < state_->devices.size(); ++i) {
    const Device device = state_->devices[i];
    check_exists("DataParallel", device);
    check(std::find(state_->devices.begin(), state_->devices.begin() + static_cast<std::ptrdiff_t>(i), device) ==
              state_->devices.begin() + static_cast<std::ptrdiff_t>(i),
          "DataParallel", "{} is listed twice in device_ids", device);
  }
  const Device first = state_->devices.front();
  state_->output_device = options.output_device.is_default() ? first : options.output_device.resolve(type);
  check_exists("DataParallel", state_->output_device);
  state_->dim = options.dim;
  auto add = [&](const NamedTensors& tensors, bool is_parameter) {
    for (const auto& [name, tensor] : tensors) {
      check(tensor.device() == first, "DataParallel",
            "'{}' is on {}, but the first of device_ids is {}; call module->to(\"{}\")", name, tensor.device(), first,
            first);
      state_->entries.push_back({tensor, is_parameter, {}, nullptr, 0});
    }
  };
  add(module->named_parameters(), true);
  add(module->named_buffers(), false);
  state_->module = module;
  register_wrapped(std::move(module));
}

DataParallel::~DataParallel() {
  for (auto& entry : state_->entries) {
    auto& replicas = entry.master.identity()->replicas;
    if (replicas && replicas->owner == state_.get()) replicas.reset();
  }
}

const std::vector<Device>& DataParallel::devices() const { return state_->devices; }

Tensor DataParallel::forward(const Tensor& x) {
  std::vector<Tensor> outputs = forward_all({&x, 1});
  check(outputs.size() == 1, "DataParallel", "the module returned {} tensors where one is needed; call model({{x}})",
        outputs.size());
  return std::move(outputs.front());
}

std::vector<Tensor> DataParallel::forward_all(std::span<const Tensor> inputs) {
  State& s = *state_;
  check(!inputs.empty(), "DataParallel", "there are no inputs to divide");
  s.replicate();
  const std::vector<int64_t> sizes = balanced_sizes(inputs.front().size(s.dim), s.devices.size());
  std::vector<std::vector<Tensor>> scattered(sizes.size()), results(sizes.size());
  for (const Tensor& input : inputs) {
    check(input.size(s.dim) == inputs.front().size(s.dim), "DataParallel",
          "the inputs differ in size along dimension {}: {} and {}", s.dim, inputs.front().shape(), input.shape());
    const std::vector<Tensor> parts = s.scatter(input, sizes);
    for (std::size_t i = 0; i < parts.size(); ++i) scattered[i].push_back(parts[i]);
  }
  s.for_each_replica(sizes.size(), [&](std::size_t i) { results[i] = s.module->forward_all(scattered[i]); });
  std::vector<Tensor> outputs;
  for (std::size_t k = 0; k < results.front().size(); ++k) {
    std::vector<Tensor> parts;
    for (auto& result : results) {
      check(result.size() == results.front().size(), "DataParallel", "replicas returned {} and {} tensors",
            results.front().size(), result.size());
      // Single numbers become a vector with one entry a replica.
      const Tensor part = result[k].to(s.output_device);
      parts.push_back(part.dim() == 0 ? part.view({1}) : part);
    }
    outputs.push_back(listen(
        "data_parallel", parts.size() == 1 ? parts.front() : cat(parts, parts.front().dim() == 1 ? 0 : s.dim), state_));
  }
  return outputs;
}

Tensor DataParallel::loss(const nn::Loss& criterion, const Tensor& x, const Tensor& y) {
  State& s = *state_;
  check(criterion.reduction() != Reduction::none, "DataParallel",
        "loss needs a criterion that gives one number; for Reduction::none compute criterion(model(x), y)");
  check(y.dim() > 0 && y.size(0) == x.size(s.dim), "DataParallel",
        "the input {} and the target {} have different numbers of rows", x.shape(), y.shape());
  s.replicate();
  const std::vector<int64_t> sizes = balanced_sizes(x.size(s.dim), s.devices.size());
  const std::vector<Tensor> inputs = s.scatter(x, sizes);
  std::vector<Tensor> targets = y.split(sizes, 0);
  std::vector<Tensor> sums(sizes.size()), normalizers(sizes.size());
  s.for_each_replica(sizes.size(), [&](std::size_t i) {
    const Tensor target = on_device(targets[i], s.devices[i]);
    LossParts parts = criterion.parts((*s.module)(inputs[i]), target);
    sums[i] = std::move(parts.sum);
    normalizers[i] = std::move(parts.normalizer);
  });
  std::vector<Tensor> parts;
  double normalizer = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    parts.push_back(sums[i].to(s.output_device));
    normalizer += normalizers[i].item<double>();
  }
  Tensor total = parts.size() == 1 ? parts.front() : sum(stack(parts));
  if (criterion.reduction() == Reduction::mean) total = total * (normalizer == 0 ? 0.0 : 1.0 / normalizer);
  return listen("data_parallel", total, state_);
}

}  // namespace tandem::parallel
