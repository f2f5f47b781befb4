// DistributedDataParallel on GPUs against one process on the CPU.
#include <cmath>
#include <optional>

#include <tandem/tandem.h>
#include <tandem/tensor/cuda_graph.h>
#include <tandem/tests/cuda/nccl_cases.h>
#include <tandem/tests/parallel/collective_cases.h>

namespace tandem::test {
namespace {

using Group = std::shared_ptr<parallel::ProcessGroup>;

std::shared_ptr<nn::SequentialImpl> make_net(int phase) {
  auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(6, 16), nn::ReLU(), nn::Linear(16, 16), nn::ReLU(),
                                                  nn::Linear(16, 4));
  const NoGradGuard no_grad;
  int salt = 0;
  for (Tensor& p : net->parameters()) p.copy_(values_of(phase, p.numel(), float32, ++salt).view(p.shape()) * 0.2);
  return net;
}

Tensor rows_of(int step, std::int64_t rows) { return values_of(step, rows * 6, float32, step).view({rows, 6}); }
Tensor labels_of(int step, std::int64_t rows) {
  std::vector<std::int64_t> labels;
  for (std::int64_t i = 0; i < rows; ++i) labels.push_back((i * 7 + step * 3) % 4);
  return tensor(labels);
}
// The rows of a rank: parts whose sizes differ by at most one.
Tensor part(const Tensor& t, const Group& group) {
  const std::int64_t rows = t.size(0), rank = group->rank(), size = group->size();
  return t.slice(0, rows * rank / size, rows * (rank + 1) / size);
}

template <class Method, class Options>
void compare(const Group& group, Device device, std::int64_t rows, const Options& options,
             const parallel::DistributedDataParallelOptions& ddp_options) {
  const nn::CrossEntropyLoss loss_fn;
  const auto alone = make_net(1), net = make_net(1 + group->rank());  // rank 0's parameters win
  net->to(device);
  parallel::DistributedDataParallel ddp(net, ddp_options);
  Method reference(alone->parameters(), options), optimizer(net->parameters(), options);
  for (int step = 0; step < 12; ++step) {
    const Tensor x = rows_of(step, rows), y = labels_of(step, rows);
    const Tensor expected = loss_fn((*alone)(x), y);
    expected.backward();
    Tensor mine = ddp.loss(loss_fn, part(x, group).to(device), part(y, group).to(device));
    mine.backward();
    Tensor whole = mine.detach().clone();
    group->all_reduce(whole, parallel::ReduceOp::avg).wait();
    const double difference = std::abs(whole.item<double>() - expected.item<double>());
    require(difference < 1e-5, fmt::format("the loss of step {} with {} rows is {}, and {} on one device", step, rows,
                                           whole.item<double>(), expected.item<double>()));
    reference.step();
    optimizer.step();
    reference.zero_grad();
    optimizer.zero_grad();
  }
  const NoGradGuard no_grad;
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    require(allclose(net->parameters()[i].to(Device()), alone->parameters()[i], 1e-4, 1e-5), "parameters are alike");
  parallel::check_consistency(ddp, optimizer, group);
}

// A model, its wrapper and its optimizer, whose step reads fixed tensors.
struct Trainer {
  Trainer(const Group& group, Device device, parallel::DistributedDataParallelOptions options, bool by_loss)
      : x(zeros({4, 6}, {.device = device})), y(zeros({4}, {.dtype = int64, .device = device})), whole(by_loss) {
    net->to(device);
    options.process_group = group;
    ddp.emplace(net, options);
    optimizer.emplace(net->parameters(), optim::AdamOptions{.lr = 1e-2});
  }
  void set_batch(int step, const Group& group) {
    x.copy_(part(rows_of(step, 4 * group->size()), group));
    y.copy_(part(labels_of(step, 4 * group->size()), group));
  }
  void operator()() {
    optimizer->zero_grad();
    Tensor loss = whole ? ddp->loss(criterion, x, y) : criterion((*ddp)(x), y);
    loss.backward();
    optimizer->step();
  }
  std::shared_ptr<nn::SequentialImpl> net = make_net(1);
  std::optional<parallel::DistributedDataParallel> ddp;
  std::optional<optim::Adam> optimizer;
  nn::CrossEntropyLoss criterion;
  Tensor x, y;
  bool whole;
};

// Rank 0 alone has made a step.
void takes_over_a_state(const Group& group, Device device) {
  const auto net = make_net(1);
  net->to(device);
  optim::Adam optimizer(net->parameters(), {.lr = 1e-2});
  for (Tensor& p : net->parameters()) p.set_grad(values_of(2, p.numel(), float32).view(p.shape()).to(device));
  if (group->rank() == 0) optimizer.step();
  parallel::broadcast_state(*net, group);
  parallel::broadcast_state(optimizer, group);
  parallel::check_consistency(*net, optimizer, group);
  optimizer.step();
  parallel::check_consistency(*net, optimizer, group);
}

}  // namespace

void gpu_graph_cases(const Group& group, Device device) {
  const parallel::DistributedDataParallelOptions many{.bucket_cap_mb = 1e-4, .first_bucket_mb = 1e-4};
  for (const bool by_loss : {false, true}) {
    Trainer plain(group, device, many, by_loss), captured(group, device, many, by_loss);
    cuda::Graph graph(device);
    for (int step = 0; step < 8; ++step) {
      plain.set_batch(step, group);
      captured.set_batch(step, group);
      plain();
      if (step < 2)
        require_error("is captured in a cuda::Graph too early", [&] { graph.capture([&] { captured(); }); });
      if (step == 3) graph.capture([&] { captured(); });
      step < 3 ? captured() : graph.replay();
    }
    for (std::size_t i = 0; i < plain.net->parameters().size(); ++i)
      require(same_bits(captured.net->parameters()[i].to(Device()), plain.net->parameters()[i].to(Device())),
              "replayed steps have the bits of plain ones");
    parallel::check_consistency(*captured.ddp, *captured.optimizer, group);
  }
  for (const auto& [options, text] :
       {std::pair(parallel::DistributedDataParallelOptions{.check_every = 5},
                  "wrap the model without it, and call check_consistency"),
        std::pair(parallel::DistributedDataParallelOptions{.find_unused_parameters = true},
                  "wrap a model that uses all its parameters")}) {
    Trainer guarded(group, device, options, false);
    for (int step = 0; step < 3; ++step) guarded();
    cuda::Graph graph(device);
    require_error(text, [&] { graph.capture([&] { guarded(); }); });
    for (int step = 0; step < 3; ++step) guarded();
  }
}

void gpu_divided_graph_cases(const Group& group, Device device) {
  // A rank that has no element of a parameter, or none of any, counts its steps all the same.
  const auto run = [&](bool with_graph, bool one_parameter) {
    auto net = make_net(1);
    net->to(device);
    parallel::DistributedDataParallel ddp(net, {.process_group = group});
    std::vector<Tensor> parameters = net->parameters();
    if (one_parameter) parameters = {parameters.back()};
    auto zero = parallel::ZeroRedundancyOptimizer::make<optim::Adam>(parameters, {.lr = 1e-2}, group);
    nn::CrossEntropyLoss criterion;
    Tensor x = zeros({4, 6}, {.device = device}), y = zeros({4}, {.dtype = int64, .device = device});
    const auto once = [&] {
      net->zero_grad();
      ddp.loss(criterion, x, y).backward();
      zero.step();
    };
    cuda::Graph graph(device);
    for (int step = 0; step < 6; ++step) {
      x.copy_(part(rows_of(step, 4 * group->size()), group));
      y.copy_(part(labels_of(step, 4 * group->size()), group));
      if (with_graph && step == 3) graph.capture(once);
      with_graph&& step > 2 ? graph.replay() : once();
    }
    once();
    std::vector<double> seen;
    for (const auto& [name, value] : zero.state_dict())
      for (const double number : value.to_vector<double>()) seen.push_back(number);
    for (const Tensor& p : net->parameters())
      for (const double number : p.to_vector<double>()) seen.push_back(number);
    return seen;
  };
  for (const bool one_parameter : {false, true})
    require(run(true, one_parameter) == run(false, one_parameter), "replayed steps of a divided optimizer");
}

void gpu_training_cases(const Group& group, Device device) {
  const parallel::DistributedDataParallelOptions one_bucket{.process_group = group};
  parallel::DistributedDataParallelOptions many{.process_group = group, .bucket_cap_mb = 1e-4, .first_bucket_mb = 1e-4};
  for (const std::int64_t rows : {8, 7, 1}) {
    compare<optim::SGD>(group, device, rows, optim::SGDOptions{.lr = 0.1, .momentum = 0.9}, many);
    compare<optim::Adam>(group, device, rows, optim::AdamOptions{.lr = 1e-2}, one_bucket);
  }
  takes_over_a_state(group, device);
  many.find_unused_parameters = true;
  compare<optim::SGD>(group, device, 8, optim::SGDOptions{.lr = 0.1}, many);
  if (group->size() > 1 && group->backend() == "nccl")
    require_error("reproducible_shards does not work over nccl", [&] {
      auto net = make_net(1);
      net->to(device);
      parallel::DistributedDataParallel(net, {.process_group = group, .reproducible_shards = 4});
    });
}

void gpu_device_cases(const Group& group, Device device) {
  const auto wrap = [&](const std::shared_ptr<nn::SequentialImpl>& net) {
    parallel::DistributedDataParallel(net, {.process_group = group});
  };
  const auto divide = [&](const std::vector<Tensor>& parameters) {
    (void)parallel::ZeroRedundancyOptimizer::make<optim::SGD>(parameters, {.lr = 0.1}, group);
  };
  nn::Linear first(2, 3), second(3, 2);
  const auto both = std::make_shared<nn::SequentialImpl>(first, second);
  if (group->rank() == 0) both->to(device);
  require_error("rank 0 has option device: a GPU, where rank 1 has option device: the CPU", [&] { wrap(both); });
  require_error("rank 0 has device: a GPU, where rank 1 has device: the CPU", [&] { divide(both->parameters()); });
  first->to(device);
  second->to(Device(DeviceType::cuda, (device.index() + 1) % 4));
  require_error(fmt::format("'0.weight' is on {} and '1.weight' on", device), [&] { wrap(both); });
  require_error(fmt::format("parameter 0 is on {} and parameter 2 on", device), [&] { divide(both->parameters()); });
  second->to(Device());
  require_error("divided as one array; move the model to one device", [&] { divide(both->parameters()); });
}

}  // namespace tandem::test
