// DistributedDataParallel against one device on the whole batch.
#include <chrono>
#include <thread>

#include <tandem/tests/parallel/ddp_cases.h>

namespace tandem::test {
namespace {

using Optimizers = std::vector<std::unique_ptr<optim::Optimizer> (*)(const std::vector<Tensor>&)>;

template <class Method, auto kOptions>
std::unique_ptr<optim::Optimizer> make(const std::vector<Tensor>& parameters) {
  return std::make_unique<Method>(parameters, kOptions());
}

const Optimizers kOptimizers = {
    make<optim::SGD, [] { return optim::SGDOptions{.lr = 0.1}; }>,
    make<optim::SGD, [] { return optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01}; }>,
    make<optim::SGD, [] { return optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true}; }>,
    make<optim::Adam, [] { return optim::AdamOptions{.lr = 1e-2, .weight_decay = 1e-2}; }>,
    make<optim::Adam, [] { return optim::AdamOptions{.lr = 1e-2, .amsgrad = true}; }>,
    make<optim::AdamW, [] { return optim::AdamWOptions{.lr = 1e-2, .weight_decay = 1e-2}; }>,
};

template <class Step>
std::vector<Tensor> train(nn::Module& net, optim::Optimizer& optimizer, std::int64_t rows, DType dtype,
                          const Step& step) {
  for (int i = 0; i < 20; ++i) {
    step(wave({rows, 6}, i, dtype), labels(rows, 4, i)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return net.parameters();
}

void compare(const Group& group, std::int64_t rows, DType dtype, double tolerance, const Optimizers& optimizers,
             const nn::Loss& loss_fn) {
  for (const auto& optimizer_for : optimizers) {
    const auto alone = make_mlp(dtype);
    const auto expected = train(*alone, *optimizer_for(alone->parameters()), rows, dtype,
                                [&](const Tensor& x, const Tensor& y) { return loss_fn((*alone)(x), y); });
    const auto net = make_mlp(dtype, group->rank());  // rank 0's parameters win
    const double cap = rows == 8 ? 1e-4 : 25;
    parallel::DistributedDataParallel ddp(net, {.process_group = group, .bucket_cap_mb = cap, .first_bucket_mb = cap});
    require((ddp.logging_data().buckets.size() > 1) == (rows == 8), "several buckets with 8 rows, else one");
    const auto optimizer = optimizer_for(net->parameters());
    const auto mine = train(*net, *optimizer, rows, dtype, [&](const Tensor& x, const Tensor& y) {
      return ddp.loss(loss_fn, part(x, group), part(y, group));
    });
    for (std::size_t i = 0; i < mine.size(); ++i)
      require_close(mine[i], expected[i], tolerance, fmt::format("parameter {} with {} rows", i, rows));
    parallel::check_consistency(ddp, *optimizer, group);  // all ranks are the same to the bit
  }
}

// 8 rows; 7, which do not divide; 1, so that all ranks but one have none.
void one_device(const Group& group) {
  compare(group, 8, float64, 1e-10, kOptimizers, nn::CrossEntropyLoss());
  for (const std::int64_t rows : {7, 1})
    compare(group, rows, float64, 1e-10, {kOptimizers[1], kOptimizers[3]}, nn::CrossEntropyLoss());
}

void class_weights_and_ignored_labels(const Group& group) {
  const Tensor weight = tensor({1.0, 0.5, 2.0, 0.0}, {.dtype = float64});
  for (const std::int64_t rows : {8, 7, 1})
    compare(group, rows, float64, 1e-10, {kOptimizers[0], kOptimizers[3]},
            nn::CrossEntropyLoss({.weight = weight, .ignore_index = 1, .label_smoothing = 0.1}));
}

void single_precision(const Group& group) {
  compare(group, 13, float32, 1e-5, {kOptimizers[0]}, nn::CrossEntropyLoss());
}

// All labels of the last rank are ignored; in the second step, those of all ranks.
void a_rank_entirely_ignored(const Group& group) {
  const nn::CrossEntropyLoss loss_fn({.ignore_index = 3});
  const auto alone = make_mlp(), net = make_mlp();
  parallel::DistributedDataParallel ddp(net, {.process_group = group});
  const Tensor x = wave({12, 6}, 1);
  Tensor y = labels(12, 3, 1);
  const std::int64_t last = 12 * (group->size() - 1) / group->size();
  y.slice(0, group->size() == 1 ? 0 : last, 12).fill_(3);
  loss_fn((*alone)(x), y).backward();
  ddp.loss(loss_fn, part(x, group), part(y, group)).backward();
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    require_close(net->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-12, "a gradient");
  net->zero_grad();
  y.fill_(3);
  const Tensor loss = ddp.loss(loss_fn, part(x, group), part(y, group));
  loss.backward();
  require(loss.item<double>() == 0, "the loss of no rows is 0");
  for (const Tensor& p : net->parameters()) require(equal(p.grad(), zeros_like(p)), "no rows, no gradient");
}

// Ten runs with other delays give the same bits, also where Dropout draws.
void delays_change_nothing(const Group& group) {
  std::vector<Tensor> first;
  for (unsigned run = 0; run < 10; ++run) {
    manual_seed(11);
    group->barrier().wait();  // threads share the generators
    auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(6, 16), nn::ReLU(), nn::Dropout(0.4), nn::Linear(16, 4));
    fill(*net);
    parallel::DistributedDataParallel ddp(net,
                                          {.process_group = group, .bucket_cap_mb = 1e-4, .first_bucket_mb = 1e-4});
    optim::Adam optimizer(ddp.parameters(), {.lr = 1e-2});
    const nn::CrossEntropyLoss loss_fn;
    unsigned noise = run * 1000 + static_cast<unsigned>(group->rank()) * 77 + 1;
    auto delay = [&] {
      noise = noise * 1664525 + 1013904223;
      std::this_thread::sleep_for(std::chrono::microseconds(noise >> 22));
    };
    for (int i = 0; i < 4; ++i) {
      const Tensor x = wave({9, 6}, i, float32), y = labels(9, 4, i);
      delay();
      const Tensor loss = ddp.loss(loss_fn, part(x, group), part(y, group));
      delay();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    parallel::check_consistency(ddp, optimizer, group);
    std::vector<Tensor> now = net->parameters();
    if (run == 0) first = now;
    for (std::size_t k = 0; k < now.size(); ++k)
      require(equal(now[k].detach(), first[k].detach()), "ten runs give the same bits");
    group->barrier().wait();
  }
}

}  // namespace

std::vector<DdpCase> equality_cases() {
  return {{"as one device", one_device},
          {"class weights and ignored labels", class_weights_and_ignored_labels},
          {"float32", single_precision},
          {"a rank entirely ignored", a_rank_entirely_ignored},
          {"delays change nothing", delays_change_nothing}};
}

}  // namespace tandem::test
