// Ranks that differ, and how they become alike.
#include <tandem/tests/parallel/ddp_cases.h>

namespace tandem::test {
namespace {

using parallel::DistributedDataParallel;

bool odd_one(const Group& group) { return group->rank() == group->size() - 1; }

// Runs `body` where it must fail on every rank; alone nothing can differ.
template <class Body>
void differs(const Group& group, std::initializer_list<std::string> parts, const Body& body) {
  if (group->size() == 1) return body();
  const std::string text = require_error(parts, body);
  const std::string last = fmt::format("rank {}", group->size() - 1);
  require(text.find(fmt::format("rank {} of {}: ", group->rank(), group->size())) == 0,
          "the text begins with the rank");
  require(text.find("rank 0") != std::string::npos && text.find(last) != std::string::npos, "both ranks are named");
}

std::shared_ptr<nn::SequentialImpl> two(nn::Linear a, nn::Linear b) {
  return std::make_shared<nn::SequentialImpl>(std::move(a), std::move(b));
}

void structure(const Group& group) {
  const bool odd = odd_one(group);
  auto wrap = [&](const std::shared_ptr<nn::Module>& net) {
    DistributedDataParallel ddp(net, {.process_group = group});
  };
  differs(
      group,
      {"parameter '0.weight': float32 {2, 2}", "parameter '0.weight': float32 {3, 2}", "build and wrap the same model"},
      [&] { wrap(two(nn::Linear(2, odd ? 3 : 2), nn::Linear(2, 2))); });
  differs(group, {"'1.bias': float32 {2}", "nothing more"},
          [&] { wrap(two(nn::Linear(2, 2), nn::Linear(2, 2, nn::LinearOptions{.bias = !odd}))); });
  differs(group, {"parameter '0.weight': float32", "parameter '0.weight': float64"}, [&] {
    const auto net = two(nn::Linear(2, 2), nn::Linear(2, 2));
    if (odd) net->to(float64);
    wrap(net);
  });
  differs(group, {"'1.weight': float32 {2, 2}, where", "'1.weight': float32 {2, 2}, frozen"}, [&] {
    const auto net = two(nn::Linear(2, 2), nn::Linear(2, 2));
    if (odd) net->parameters()[2].requires_grad_(false);
    wrap(net);
  });
  struct Named : nn::Module {
    explicit Named(const std::string& buffer) {
      register_module("a", nn::Linear(2, 2));
      register_buffer(buffer, ones({3}));
    }
  };
  differs(group, {"buffer 'mean': float32 {3}", "buffer 'average': float32 {3}"},
          [&] { wrap(std::make_shared<Named>(odd ? "average" : "mean")); });
  differs(group, {"option find_unused_parameters: false", "option find_unused_parameters: true"}, [&] {
    DistributedDataParallel ddp(make_mlp(),
                                {.process_group = group, .find_unused_parameters = odd && group->size() > 1});
  });
  wrap(two(nn::Linear(2, 2), nn::Linear(2, 2)));  // the group still works
}

void values(const Group& group) {
  struct Net : nn::Module {
    Tensor forward(const Tensor& x) override { return a(x); }
    nn::Linear a = register_module("a", nn::Linear(3, 2));
    nn::Buffer count = register_buffer("count", zeros({}, {.dtype = int64}));
  };
  Net net;
  fill(net);
  optim::Adam optimizer(net.parameters(), {.lr = 0.5});
  auto check_all = [&] { parallel::check_consistency(net, optimizer, group); };
  const NoGradGuard no_grad;
  check_all();
  parallel::check_consistency(net, group);
  net.a->weight.copy_(ones({2, 3}));
  if (odd_one(group)) net.a->weight.detach().select(0, 1).select(0, 2).fill_(1.25);
  differs(group, {"element (1, 2) of parameter 'a.weight' is 1 on rank 0, but 1.25 on rank", "broadcast_state"},
          check_all);
  parallel::broadcast_state(net, group);
  check_all();
  if (group->size() > 1) require(equal(net.a->weight.detach(), ones({2, 3})), "rank 0's weights");
  if (odd_one(group)) net.count.fill_(7);
  differs(group, {"the value of buffer 'count' is 0 on rank 0, but 7 on rank"},
          [&] { parallel::check_consistency(net, group); });
  net.count.fill_(0);
  if (odd_one(group)) optimizer.set_lr(0.25);
  differs(group, {"optimizer state 'group.0.lr' is 0.5 on rank 0, but 0.25 on rank"}, check_all);
  optimizer.set_lr(0.5);
  for (Tensor& p : net.parameters()) p.set_grad(ones_like(p));
  if (odd_one(group)) net.parameters()[1].set_grad({});
  optimizer.step();
  parallel::broadcast_state(net, group);
  differs(group, {"rank 0 has optimizer state '1.step'", "has optimizer state 'group.0.lr'"}, check_all);
}

void broadcast_state(const Group& group) {
  const auto net = make_mlp();
  optim::Adam optimizer(net->parameters(), {.lr = 0.1 * (group->rank() + 1), .amsgrad = true});
  if (group->rank() == 0) {  // as if loaded from a file
    const NoGradGuard no_grad;
    for (Tensor& p : net->parameters()) p.set_grad(wave(p.shape(), 3));
    for (int i = 0; i < 3; ++i) optimizer.step();
    optimizer.zero_grad();
  }
  parallel::broadcast_state(*net, group);
  parallel::broadcast_state(optimizer, group);
  parallel::check_consistency(*net, optimizer, group);
  require(optimizer.lr() == 0.1, "rank 0's settings");
  require(optimizer.state_dict().front().second.item<int>() == 3, "rank 0's state");
  if (group->size() == 1) return;
  optim::SGD other(net->parameters(), {.momentum = 0.9});
  Stateful& mine = odd_one(group) ? static_cast<Stateful&>(other) : optimizer;
  require_error({fmt::format("rank {} of {}: rank {} cannot take over rank 0's optimizer: ", group->rank(),
                             group->size(), group->size() - 1)},
                [&] { parallel::broadcast_state(mine, group); });
  require(other.lr() == optim::SGDOptions().lr, "nothing is changed");
}

// The first step finds what would let the ranks drift apart, and changes nothing.
void first_step(const Group& group) {
  const auto net = make_mlp();
  DistributedDataParallel ddp(net, {.process_group = group});
  optim::SGD optimizer(net->parameters(), {.lr = odd_one(group) ? 0.25 : 0.5});
  auto step = [&] {
    mean(ddp(wave({2, 6}, 1))).backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  const Tensor before = net->parameters()[0].detach().clone();
  for (int i = 0; i < 2; ++i)
    differs(group, {"'group.0.lr' is 0.5 on rank 0, but 0.25 on rank"}, [&] {
      if (group->size() > 1) step();
    });
  require(equal(net->parameters()[0].detach(), before), "nothing has changed");
  optimizer.zero_grad();
  optimizer.set_lr(0.5);
  step();
  if (odd_one(group)) optimizer.set_lr(0.25);
  step();  // only the first is checked
  // Each of several optimizers is checked at its own first step.
  const auto other = make_mlp();
  DistributedDataParallel again(other, {.process_group = group});
  const std::vector<Tensor> all = other->parameters();
  optim::SGD one({all[0], all[1]}), two({all[2], all[3]}, {.lr = odd_one(group) ? 0.25 : 0.5});
  mean(again(wave({2, 6}, 1))).backward();
  one.step();
  differs(group, {"'group.0.lr' is 0.5 on rank 0"}, [&] { two.step(); });
}

// Three ranks vote.
void majority(const Group& group) {
  if (group->size() < 3) return;
  nn::Linear net(3, 2);
  fill(*net);
  const NoGradGuard no_grad;
  net->weight.copy_(ones({2, 3}));
  if (group->rank() == 0) net->weight.detach()[1].fill_(2);
  net->bias.copy_(ones({2}));
  if (odd_one(group)) net->bias.fill_(3);
  require_error({"element (1, 0) of parameter 'weight' is 1 on rank 1, but 2 on rank 0"},
                [&] { parallel::check_consistency(*net, group); });
  if (group->rank() == 0) net->weight.copy_(ones({2, 3}));
  require_error({fmt::format("element (0) of parameter 'bias' is 1 on rank 0, but 3 on rank {}", group->size() - 1)},
                [&] { parallel::check_consistency(*net, group); });
}

}  // namespace

std::vector<DdpCase> consistency_cases() {
  return {{"structure", structure},
          {"values", values},
          {"broadcast_state", broadcast_state},
          {"first step", first_step},
          {"majority", majority}};
}

}  // namespace tandem::test
