// How it works: what is launched when, and in which order.
#include <tandem/tests/parallel/ddp_cases.h>
#include <tandem/tests/parallel/spy_group.h>

namespace tandem::test {
namespace {

using parallel::DistributedDataParallel;

void launched_while_backward_runs(const Group& group) {
  const auto spy = std::make_shared<Spy>(group);
  const auto net = make_mlp();
  std::size_t before_last = 0;
  const auto last = autograd::register_post_accumulate_grad_hook(
      net->parameters()[0], [&](const Tensor&) { before_last = spy->reduced.size(); });
  // Buckets: {2.bias}, {2.weight}, {0.bias}, {0.weight}, in some order that arrival decides.
  DistributedDataParallel ddp(net, {.process_group = spy, .bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5});
  require(ddp.logging_data().buckets.size() == 4, "a bucket for each parameter");
  std::vector<std::int64_t> sizes;
  for (int step = 0; step < 4; ++step) {
    spy->reduced.clear();
    mean(ddp(wave({2, 6}, step))).backward();
    require(spy->reduced.size() == 4, "one all_reduce a bucket");
    if (step > 0) require(before_last >= 2, "buckets are launched before the last gradient");
    if (step == 1) sizes = spy->reduced;
    if (step > 1) require(spy->reduced == sizes, "in one fixed order");
    net->zero_grad();
  }
  const parallel::LoggingData data = ddp.logging_data();
  require(data.rebuilt, "the order is rebuilt");
  std::vector<std::string> in_buckets;
  for (const auto& bucket : data.buckets)
    for (const std::string& name : bucket.parameters) in_buckets.push_back(name);
  require(in_buckets == data.arrival_order, "buckets are in the order of arrival");
  require(data.forward > 0 && data.backward > 0 && data.communication > 0, "times are measured");
  require(data.overlap <= data.communication && data.overlap <= data.backward, "overlap is a part of both");
}

// All but the last bucket are under way before the hook of the last gradient runs.
void all_but_the_last(const Group& group) {
  struct Chain : nn::Module {
    Chain() {
      for (int i = 0; i < 5; ++i)
        layers.push_back(register_module(fmt::format("l{}", i), nn::Linear(4, 4, nn::LinearOptions{.bias = false})));
    }
    Tensor forward(const Tensor& x) override {
      Tensor y = x;
      for (auto& layer : layers) y = layer(y);
      return y;
    }
    std::vector<nn::Linear> layers;
  };
  const auto spy = std::make_shared<Spy>(group);
  const auto net = std::make_shared<Chain>();
  std::vector<std::size_t> launched;
  std::vector<autograd::HookHandle> handles;
  for (int i = 4; i >= 0; --i)
    handles.push_back(
        autograd::register_post_accumulate_grad_hook(net->layers[static_cast<std::size_t>(i)]->weight,
                                                     [&](const Tensor&) { launched.push_back(spy->reduced.size()); }));
  DistributedDataParallel ddp(net, {.process_group = spy, .bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5});
  sum(ddp(ones({2, 4}))).backward();
  require(launched == std::vector<std::size_t>{0, 1, 2, 3, 4}, "each bucket is launched before the next gradient");
  require(spy->reduced.size() == 5, "and the last with it");
}

// The first plan is the reverse of the registration; the second follows rank 0, whatever the others' orders are.
void rebuilt_once(const Group& group) {
  struct Sum : nn::Module {
    Tensor forward(const Tensor& x) override { return reverse ? b(x) + a(x) : a(x) + b(x); }
    nn::Linear a = register_module("a", nn::Linear(3, 3)), b = register_module("b", nn::Linear(3, 3));
    bool reverse = false;
  };
  const auto spy = std::make_shared<Spy>(group);
  const auto net = std::make_shared<Sum>();
  net->reverse = group->rank() == 0;
  DistributedDataParallel ddp(net, {.process_group = spy});
  require(spy->allocations.size() == 1, "one bucket");
  using Names = std::vector<std::string>;
  require(ddp.logging_data().buckets.front().parameters == Names{"b.bias", "b.weight", "a.bias", "a.weight"},
          "reverse");
  require(ddp.logging_data().buckets.front().bytes == 4 * (9 + 3) * 2, "bytes");
  Names first;
  for (int step = 0; step < 4; ++step) {
    spy->calls.clear();
    sum(ddp(ones({2, 3}))).backward();
    require((std::find(spy->calls.begin(), spy->calls.end(), "broadcast") != spy->calls.end()) == (step == 1),
            "rebuilt in the second backward");
    const parallel::LoggingData data = ddp.logging_data();
    if (step == 0) first = data.arrival_order;
    if (step > 0) {
      Names mine = data.buckets.front().parameters;
      require(data.rebuilt, "rebuilt");
      if (group->rank() == 0) require(mine == first, "rank 0's order");
    }
    if (step % 2 == 0) net->zero_grad();  // gradients that exist move to the new buckets
  }
  require(spy->allocations.size() <= 2, "once");
  const Tensor plan =
      tensor(std::vector<std::int64_t>{ddp.logging_data().buckets.front().parameters.front() == "a.bias",
                                       ddp.logging_data().buckets.front().parameters.front() == "b.bias"});
  require_close(average(plan.to(float64), group), plan.to(float64), 0, "the order on all ranks");
}

void find_unused_keeps_its_order(const Group& group) {
  DistributedDataParallel ddp(make_mlp(), {.process_group = group, .find_unused_parameters = true});
  for (int step = 0; step < 2; ++step) mean(ddp(wave({2, 6}, 1))).backward();
  require(!ddp.logging_data().rebuilt, "with find_unused_parameters the first plan stays");
}

// The layers' backward writes gradients where they are reduced from: nothing is copied.
void written_in_place(const Group& group) {
  const auto net = make_mlp();
  DistributedDataParallel ddp(net, {.process_group = group, .bucket_cap_mb = 1e-4, .first_bucket_mb = 1e-4});
  std::vector<const void*> written(4);
  std::vector<autograd::HookHandle> hooks;
  for (std::size_t i = 0; i < 4; ++i)
    hooks.push_back(autograd::register_hook(net->parameters()[i], [&written, i](const Tensor& g) {
      written[i] = g.raw().data;
      return Tensor();
    }));
  for (int step = 0; step < 3; ++step) {  // the order is rebuilt on the way
    mean(ddp(wave({2, 6}, step))).backward();
    for (std::size_t i = 0; i < 4; ++i)
      require(net->parameters()[i].grad().raw().data == written[i], "a gradient stays where it was written");
    net->zero_grad();
  }
}

void two_dtypes(const Group& group) {
  struct Two : nn::Module {
    Two() { b->to(float64); }
    Tensor forward(const Tensor& x) override { return b(a(x).to(float64)); }
    nn::Linear a = register_module("a", nn::Linear(3, 3)), b = register_module("b", nn::Linear(3, 2));
  };
  const auto net = std::make_shared<Two>(), alone = std::make_shared<Two>();
  fill(*net);
  fill(*alone);
  DistributedDataParallel ddp(net, {.process_group = group});
  require(ddp.logging_data().buckets.size() == 2, "a bucket for each dtype");
  for (int step = 0; step < 2; ++step) {
    sum((*alone)(ones({2, 3}))).backward();
    sum(ddp(ones({2, 3}))).backward();
  }
  for (std::size_t i = 0; i < 4; ++i)
    require_close(net->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-6, "two dtypes");
}

void several_inputs(const Group& group) {
  struct Pair : nn::Module {
    std::vector<Tensor> forward_all(std::span<const Tensor> in) override {
      const Tensor h = relu(a(in[0]));
      return {h, b(h + in[1])};
    }
    nn::Linear a = register_module("a", nn::Linear(3, 3)), b = register_module("b", nn::Linear(3, 2));
  };
  const auto net = std::make_shared<Pair>();
  net->to(float64);
  fill(*net);
  DistributedDataParallel ddp(net, {.process_group = group});
  Pair alone;
  alone.to(float64);
  fill(alone);
  auto loss = [](nn::Module& m, int r) {
    const std::vector<Tensor> out = m({wave({2, 3}, r), wave({2, 3}, r + 50)});
    return mean(pow(out[0], 2)) + mean(out[1]);
  };
  for (int r = 0; r < group->size(); ++r) (loss(alone, r) * (1.0 / group->size())).backward();
  loss(ddp, group->rank()).backward();
  for (std::size_t i = 0; i < 4; ++i)
    require_close(net->parameters()[i].grad(), alone.parameters()[i].grad(), 1e-12, "several inputs and outputs");
}

// The model of the benchmarks has the plan of the other systems.
void default_plan(const Group& group) {
  const auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(784, 512), nn::ReLU(), nn::Linear(512, 512),
                                                        nn::ReLU(), nn::Linear(512, 10));
  DistributedDataParallel ddp(net, {.process_group = group});
  const auto buckets = ddp.logging_data().buckets;
  require(buckets.size() == 2 && buckets[0].bytes == 1'071'144 && buckets[1].bytes == 1'607'680, "two buckets");
}

void what_it_says_of_itself(const Group& group) {
  const auto net = make_mlp();
  DistributedDataParallel ddp(net, {.process_group = group});
  require(ddp.module() == net, "the wrapped module");
  require(ddp.extra() == fmt::format("ranks={}, backend={}", group->size(), group->backend()), "ranks and backend");
  require(ddp.str().find(ddp.extra()) != std::string::npos, "they are printed");
}

}  // namespace

std::vector<DdpCase> mechanism_cases() {
  return {{"launched while backward runs", launched_while_backward_runs},
          {"all but the last", all_but_the_last},
          {"rebuilt once", rebuilt_once},
          {"find_unused keeps its order", find_unused_keeps_its_order},
          {"written in place", written_in_place},
          {"two dtypes", two_dtypes},
          {"several inputs", several_inputs},
          {"default plan", default_plan},
          {"what it says of itself", what_it_says_of_itself}};
}

}  // namespace tandem::test
