#include <tandem/parallel/distributed_data_parallel.h>

#include <tandem/autograd/grad_mode.h>
#include <tandem/parallel/backward_end.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/random.h>

namespace tandem::parallel {

// Shared with the graph: a backward may come after the wrapper is gone.
struct DistributedDataParallel::State final : BackwardListener {
  std::shared_ptr<nn::Module> module;
  std::shared_ptr<ProcessGroup> group;
  NamedTensors parameters;

  // Averages the gradients over the ranks, all of one dtype in one call.
  void end() override {
    const NoGradGuard no_grad;
    for (const auto& [name, p] : parameters)
      check(!p.requires_grad() || p.grad().defined(), "DistributedDataParallel",
            "rank {} of {}: parameter '{}' got no gradient in this backward; every parameter must take part in the "
            "loss on "
            "every rank, or be frozen with requires_grad_(false) on all",
            group->rank(), group->size(), name);
    for (const DType dtype : {float32, float64}) {
      std::vector<Tensor> flat;
      for (const auto& [name, p] : parameters)
        if (p.requires_grad() && p.dtype() == dtype) flat.push_back(p.grad().reshape({-1}));
      if (flat.empty()) continue;
      Tensor bucket = cat(flat);
      group->all_reduce(bucket, ReduceOp::avg).wait();
      int64_t at = 0;
      for (Tensor& g : flat) {
        g.copy_(bucket.narrow(0, at, g.numel()));
        at += g.numel();
      }
    }
  }
};

DistributedDataParallel::DistributedDataParallel(std::shared_ptr<nn::Module> module,
                                                 const DistributedDataParallelOptions& options)
    : state_(std::make_shared<State>()) {
  check(module != nullptr, "DistributedDataParallel",
        "the module is empty; make it first, as in std::make_shared<Net>()");
  check(options.device_ids.size() <= 1, "DistributedDataParallel",
        "device_ids has {} entries; a process works on one device", options.device_ids.size());
  state_->module = module;
  state_->group = options.process_group ? options.process_group : default_group();
  state_->parameters = module->named_parameters();
  bool any = false;
  for (const auto& [name, p] : state_->parameters) {
    any |= p.requires_grad();
    for (const DeviceId& id : options.device_ids)
      check(id.resolve(p.device().type()) == p.device(), "DistributedDataParallel",
            "'{}' is on {}, but device_ids says {}", name, p.device(), id.resolve(p.device().type()));
  }
  check(any, "DistributedDataParallel",
        "no parameter requires grad, so there is nothing to average; use the module itself");
  const NoGradGuard no_grad;
  for (Tensor& p : module->parameters()) state_->group->broadcast(p, 0).wait();
  for (Tensor& b : module->buffers()) state_->group->broadcast(b, 0).wait();
  register_wrapped(std::move(module));
}

Tensor DistributedDataParallel::forward(const Tensor& x) {
  const RandomStream stream(state_->group->rank());
  return listen("distributed_data_parallel", (*state_->module)(x), state_);
}

std::vector<Tensor> DistributedDataParallel::forward_all(std::span<const Tensor> inputs) {
  const RandomStream stream(state_->group->rank());
  std::vector<Tensor> outputs = state_->module->forward_all(inputs);
  for (Tensor& y : outputs) y = listen("distributed_data_parallel", y, state_);
  return outputs;
}

Tensor DistributedDataParallel::loss(const nn::Loss& criterion, const Tensor& x, const Tensor& y) {
  check(criterion.reduction() == Reduction::mean, "DistributedDataParallel",
        "loss needs a criterion with Reduction::mean; for others compute criterion(model(x), y)");
  LossParts parts;
  {
    const RandomStream stream(state_->group->rank());
    parts = criterion.parts((*state_->module)(x), y);
  }
  Tensor normalizer = parts.normalizer.detach().to(float64);
  state_->group->all_reduce(normalizer, ReduceOp::sum).wait();
  const double total = normalizer.item<double>();
  return listen("distributed_data_parallel", parts.sum * (total == 0 ? 0.0 : state_->group->size() / total), state_);
}

}  // namespace tandem::parallel
