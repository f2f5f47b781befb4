#include <tandem/parallel/replicas.h>

#include <algorithm>
#include <exception>

#include <tandem/autograd/node.h>
#include <tandem/parallel/contents.h>
#include <tandem/parallel/data_parallel.h>
#include <tandem/parallel/distributed_data_parallel.h>
#include <tandem/parallel/on_device.h>
#include <tandem/parallel/reproducible.h>
#include <tandem/tensor/random.h>
#include <tandem/tensor/threads.h>
#include <tandem/tensor/trace.h>

namespace tandem::parallel {

Replicas::Replicas(std::shared_ptr<nn::Module> module, std::vector<Device> devices, std::shared_ptr<PhaseLog> log,
                   FixedSums fixed_sums)
    : module_(std::move(module)),
      devices_(std::move(devices)),
      log_(log ? std::move(log) : std::make_shared<PhaseLog>()),
      fixed_sums_(std::move(fixed_sums)) {
  check(module_ != nullptr, "DataParallel", "the module is empty; make it first, as in std::make_shared<Net>()");
  check(!devices_.empty(), "DataParallel", "the list of devices is empty; give at least one");
  for (const nn::Module* part : module_->modules()) {
    check(dynamic_cast<const DataParallel*>(part) == nullptr, "DataParallel",
          "the module contains a DataParallel already; wrap the whole model once");
    check(dynamic_cast<const DistributedDataParallel*>(part) == nullptr, "DataParallel",
          "the module contains a DistributedDataParallel, whose process works on one device; use one of the two");
  }
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    check_exists("DataParallel", devices_[i]);
    check(devices_[i].type() == devices_.front().type(), "DataParallel",
          "the devices are of two kinds, {} and {}; give CPU devices or CUDA devices", devices_.front(), devices_[i]);
    const auto found = std::find(distinct_.begin(), distinct_.end(), devices_[i]);
    const auto at = static_cast<std::size_t>(found - distinct_.begin());
    if (found == distinct_.end()) {
      distinct_.push_back(devices_[i]);
      replicas_of_.emplace_back();
    }
    replicas_of_[at].push_back(i);
  }
  auto add = [&](const NamedTensors& tensors, bool is_parameter) {
    for (const auto& [name, tensor] : tensors) {
      check(tensor.device() == devices_.front(), "DataParallel",
            "'{}' is on {}, but the first of the devices is {}; call module->to(\"{}\")", name, tensor.device(),
            devices_.front(), devices_.front());
      entries_.push_back({.name = name, .master = tensor, .is_parameter = is_parameter});
    }
  };
  add(module_->named_parameters(), true);
  add(module_->named_buffers(), false);
  const NoGradGuard no_grad;
  for (Entry& entry : entries_) bind(entry);
}

Replicas::~Replicas() {
  for (Entry& entry : entries_) {
    auto& replicas = entry.master.identity()->replicas;
    if (replicas && replicas->owner == this) replicas.reset();
  }
}

void Replicas::bind(Entry& entry) {
  const TensorImpl& master = *entry.master.identity();
  entry.storage = master.storage;
  entry.conversions = master.conversions;
  auto set = std::make_shared<ReplicaSet>();
  set->owner = this;
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    Tensor replica = on_device(entry.master.detach(), devices_[i]);
    // Two replicas of a buffer never share: forward writes to it.
    if (!entry.is_parameter && i > 0 && share_memory(devices_[i], devices_.front())) replica = replica.clone();
    set->replicas.push_back(replica.identity());
    entry.versions.push_back(replica.version());
    entry.replicas.push_back(std::move(replica));
  }
  entry.set = std::move(set);
}

// Made at the first forward that records, and again when a parameter is trained that was frozen before.
void Replicas::make_reducer() {
  std::vector<ReplicaReducer::Leaves> parameters;
  std::vector<Entry*> reduced;
  for (Entry& entry : entries_) {
    entry.reduced = entry.reduced || (entry.is_parameter && entry.master.requires_grad());
    if (!entry.reduced) continue;
    reduced.push_back(&entry);
    auto& leaves = parameters.emplace_back();
    leaves.name = entry.name;
    leaves.master = entry.master;
    for (const Tensor& replica : entry.replicas) leaves.replicas.push_back(autograd::meta_of(replica)->leaf);
  }
  reducer_ = std::make_shared<ReplicaReducer>(std::move(parameters), devices_, distinct_, fixed_sums_);
  if (!share_memory(distinct_.front(), distinct_.back())) return;  // the optimizer's step is the first device's
  for (std::size_t p = 0; p < reduced.size(); ++p) {
    auto set = std::make_shared<ReplicaSet>(*reduced[p]->set);
    set->devices = distinct_;
    set->cuts = reducer_->cuts(p);
    reduced[p]->set = std::move(set);
  }
}

std::shared_ptr<ReplicaReducer> Replicas::reducer() {
  const std::lock_guard lock(mutex_);
  return reducer_;
}

bool Replicas::current() const {
  return std::all_of(entries_.begin(), entries_.end(), [](const Entry& entry) {
    const TensorImpl& master = *entry.master.identity();
    return entry.storage == master.storage && entry.conversions == master.conversions;
  });
}

// What was written to the module, or by replica 0, reaches the others; what they wrote themselves is gone.
void Replicas::restore(Entry& entry) {
  const bool all = entry.versions.front() != entry.master.version();
  entry.versions.front() = entry.master.version();
  for (std::size_t i = 1; i < devices_.size(); ++i) {
    if (!all && entry.versions[i] == entry.replicas[i].version()) continue;
    if (entry.replicas[i].impl()->storage == entry.storage) continue;  // a second replica on the first device
    entry.replicas[i].copy_(entry.master.detach());
    entry.versions[i] = entry.replicas[i].version();
    log_->add_bytes(entry.master.nbytes());
  }
}

void Replicas::refresh() {
  check(ReplicaScope::owner() == nullptr, "DataParallel",
        "was called inside a replica of another DataParallel; wrap the whole model once");
  const PhaseTimer timer(*log_, &Phases::replicate);
  const bool recording = grad_enabled();
  const NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  bool unknown = false;
  const bool shared = share_memory(distinct_.front(), distinct_.back());
  for (Entry& entry : entries_) {
    if (!entry.is_parameter || !shared) restore(entry);
    const bool wanted = entry.master.requires_grad();
    for (Tensor& replica : entry.replicas)
      if (replica.requires_grad() != wanted) replica.requires_grad_(wanted);
    unknown = unknown || (recording && entry.is_parameter && wanted && !entry.reduced);
  }
  if (unknown) make_reducer();
  for (Entry& entry : entries_)
    if (auto& set = entry.master.identity()->replicas; set != entry.set) set = entry.set;  // after another wrapper
}

void Replicas::check_alike(std::int64_t step) const {
  const NoGradGuard no_grad;
  for (const Entry& entry : entries_)
    for (std::size_t i = 0; entry.is_parameter && i < devices_.size(); ++i)
      if (const auto found = first_difference(entry.master, entry.replicas[i]))
        fail("DataParallel",
             "replica {} on {} differs at step {}: {} of parameter '{}' is {} in the module, but {} there; a forward "
             "has given it a value of its own: write to parameters outside of the model's forward",
             i, devices_[i], step, found->place, entry.name, found->first, found->other);
}

void Replicas::run(std::size_t count, FunctionRef<void(std::size_t)> body) const {
  const PhaseTimer timer(*log_, &Phases::forward);
  std::size_t used = 0;
  while (used < distinct_.size() && replicas_of_[used].front() < count) ++used;
  std::vector<std::exception_ptr> errors(count);
  run_on_devices(std::span(distinct_).first(used), [&](int device) {
    for (const std::size_t i : replicas_of_[static_cast<std::size_t>(device)]) {
      if (i >= count) return;
      const ReplicaScope replica(this, static_cast<int>(i));
      const RandomStream stream((fixed_sums_.on ? kFirstPartStream : 0) + static_cast<int>(i));
      const trace::DeviceSpan span("forward", devices_[i], {"replica", static_cast<std::int64_t>(i)});
      try {
        body(i);
      } catch (const std::exception& e) {
        errors[i] = std::make_exception_ptr(Error(fmt::format("replica {} on {}: {}", i, devices_[i], e.what())));
        return;
      } catch (...) {
        errors[i] = std::current_exception();
        return;
      }
    }
  });
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

Tensor Replicas::listen(const Tensor& result) { return parallel::listen("data_parallel", result, shared_from_this()); }

void Replicas::begin() {
  {
    const std::lock_guard lock(mutex_);  // several backwards may run at once
    backward_start_ = log_->now();
  }
  for (const Entry& entry : entries_)
    check(entry.conversions == entry.master.identity()->conversions, "DataParallel",
          "'{}' was moved or converted after the forward; run the forward again", entry.name);
}

void Replicas::end() {
  PhaseTime start;
  {
    const std::lock_guard lock(mutex_);
    start = backward_start_;
  }
  log_->add(&Phases::backward, std::move(start), log_->now());
  const auto sums = reducer();
  if (!sums) return;  // one device alone
  const PhaseTimer timer(*log_, &Phases::reduce);
  sums->reduce();
}

void Replicas::abandon() {
  if (const auto sums = reducer()) sums->discard();
}

}  // namespace tandem::parallel
