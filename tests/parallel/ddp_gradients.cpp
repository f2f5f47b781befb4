// What happens to gradients: how they accumulate, where they live, who sees them.
#include <optional>

#include <tandem/autograd/node.h>
#include <tandem/tests/parallel/ddp_cases.h>

namespace tandem::test {
namespace {

using parallel::DistributedDataParallel;

// What each rank computes; every rank can compute all of them.
Tensor input_of(int rank, double phase = 0) { return wave({3, 6}, 10 * rank + phase); }

// The average over the ranks of the gradients of `loss`, computed on one device for each rank's input.
template <class Loss>
std::vector<Tensor> expected_gradients(nn::Module& model, const Group& group, const Loss& loss) {
  for (int r = 0; r < group->size(); ++r) (loss(model, r) * (1.0 / group->size())).backward();
  std::vector<Tensor> gradients;
  for (const Tensor& p : model.parameters()) gradients.push_back(p.grad());
  return gradients;
}
void require_gradients(const nn::Module& model, const std::vector<Tensor>& expected, std::string_view what,
                       double scale = 1) {
  const std::vector<Tensor> parameters = model.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (expected[i].defined())
      require_close(parameters[i].grad(), expected[i] * scale, 1e-12, fmt::format("{}: gradient {}", what, i));
    else
      require(!parameters[i].grad().defined(), what);
}
Tensor square(nn::Module& model, int r) { return mean(pow(model(input_of(r)), 2)); }

// pytorch#41324, #105723, huggingface/transformers#24970: a shared parameter, or several forwards before a backward,
// were "marked as ready twice".
void tied_and_used_twice(const Group& group) {
  struct Tied : nn::Module {
    Tied() { shared = register_parameter("shared", a->weight); }
    Tensor forward(const Tensor& x) override { return matmul(matmul(relu(a(x)), shared), shared) + b(x); }
    nn::Linear a = register_module("a", nn::Linear(6, 6)), b = register_module("b", nn::Linear(6, 6));
    nn::Parameter shared;
  };
  const auto alone = std::make_shared<Tied>(), net = std::make_shared<Tied>();
  for (const auto& m : {alone, net}) {
    m->to(float64);
    fill(*m);
  }
  const auto expected = expected_gradients(*alone, group, square);
  DistributedDataParallel ddp(net, {.process_group = group});
  for (int i = 0; i < 3; ++i) {
    square(ddp, group->rank()).backward();
    require_gradients(*net, expected, "tied");
    net->zero_grad();
  }
}

void several_forwards(const Group& group) {
  auto loss = [](nn::Module& m, int r) {
    const Tensor a = m(input_of(r, 1)), b = m(input_of(r, 2)), c = m(input_of(r, 3));
    return mean(a * b + pow(c, 2));
  };
  const auto expected = expected_gradients(*make_mlp(), group, loss);
  const auto net = make_mlp();
  DistributedDataParallel ddp(net, {.process_group = group});
  loss(ddp, group->rank()).backward();
  require_gradients(*net, expected, "several forwards");
}

// A hook may return a view of the gradient: of the bucket that is to be averaged.
void hooks_that_return_views(const Group& group) {
  using View = Tensor (*)(const Tensor&);
  const View views[] = {[](const Tensor& g) { return g.t(); },
                        [](const Tensor& g) {
                          return g.slice(0, 0, 1).expand({3, 3});
                        },
                        [](const Tensor& g) {
                          return g.slice(0, 1, 2).expand({3, 3});
                        },
                        [](const Tensor& g) {
                          return g.view({9}).view({3, 3});
                        }};
  for (const View& view : views) {
    const auto net = std::make_shared<nn::LinearImpl>(3, 3, nn::LinearOptions{.bias = false});
    net->to(float64);
    DistributedDataParallel ddp(net, {.process_group = group});
    const auto handle = autograd::register_hook(net->weight, view);
    const Tensor x = wave({2, 3}, group->rank()), scale = wave({2, 3}, 5);
    const Tensor expected = view(average(matmul(scale.t(), x), group));
    for (int i = 1; i <= 2; ++i) {
      sum(ddp(x) * scale).backward();
      require_close(net->weight.grad(), expected * i, 1e-12, "the gradient");
    }
    // The same for a gradient that the user sets, here on one rank.
    if (group->rank() == 0) net->weight.set_grad(net->weight.grad().t());
    const Tensor before = average(net->weight.grad(), group);
    sum(ddp(x) * scale).backward();
    require_close(net->weight.grad(), before + expected, 1e-12, "added to a view");
  }
}

void accumulation(const Group& group) {
  const auto expected = expected_gradients(*make_mlp(), group, square);
  const auto net = make_mlp();
  DistributedDataParallel ddp(net, {.process_group = group});
  square(ddp, group->rank()).backward();
  square(ddp, group->rank()).backward();
  require_gradients(*net, expected, "two backwards without zero_grad", 2);
  net->zero_grad();
  const Tensor loss = square(ddp, group->rank());
  loss.backward({}, true);
  require_gradients(*net, expected, "retain_graph, first");
  loss.backward();
  require_gradients(*net, expected, "retain_graph, second", 2);
  // Two forwards, then a backward of each.
  net->zero_grad();
  const Tensor one = square(ddp, group->rank()), two = square(ddp, group->rank());
  one.backward();
  require_gradients(*net, expected, "the first of two graphs");
  two.backward();
  require_gradients(*net, expected, "the second of two graphs", 2);
}

void no_sync(const Group& group) {
  const auto expected = expected_gradients(*make_mlp(), group, square);
  const auto net = make_mlp();
  DistributedDataParallel ddp(net, {.process_group = group});
  std::vector<Tensor> local;
  {
    const auto alone = make_mlp();
    square(*alone, group->rank()).backward();
    for (const Tensor& p : alone->parameters()) local.push_back(p.grad());
  }
  for (int i = 0; i < 2; ++i) {
    Tensor inside;
    {
      const auto guard = ddp.no_sync();
      square(ddp, group->rank()).backward();
      require_gradients(*net, local, "no_sync keeps to this rank");
      inside = square(ddp, group->rank());
    }
    inside.backward();  // its forward decides
    require_gradients(*net, local, "a forward under no_sync", 2);
    square(ddp, group->rank()).backward();
    require_gradients(*net, expected, "what was accumulated is averaged too", 3);
    net->zero_grad();
  }
  {
    const auto outer = ddp.no_sync();
    { const auto inner = ddp.no_sync(); }
    square(ddp, group->rank()).backward();
    require_gradients(*net, local, "a guard within a guard");
  }
}

// A parameter that only a forward under no_sync uses is averaged in the next synchronised backward.
void used_only_in_no_sync(const Group& group) {
  struct Switch : nn::Module {
    Tensor forward(const Tensor& x) override { return both ? b(a(x)) : a(x); }
    nn::Linear a = register_module("a", nn::Linear(6, 6)), b = register_module("b", nn::Linear(6, 6));
    bool both = true;
  };
  for (const bool find : {false, true}) {
    const auto alone = std::make_shared<Switch>(), net = std::make_shared<Switch>();
    for (const auto& m : {alone, net}) {
      m->to(float64);
      fill(*m);
    }
    const auto expected = expected_gradients(*alone, group, square);
    DistributedDataParallel ddp(net, {.process_group = group, .find_unused_parameters = find});
    {
      const auto guard = ddp.no_sync();
      square(ddp, group->rank()).backward();
    }
    net->both = false;
    square(ddp, group->rank()).backward();
    require_close(net->b->weight.grad(), expected[2], 1e-12, "used only under no_sync");
    require_close(net->b->bias.grad(), expected[3], 1e-12, "used only under no_sync");
  }
}

void frozen(const Group& group) {
  const auto alone = make_mlp(), net = make_mlp();
  for (const auto& m : {alone, net}) m->parameters()[0].requires_grad_(false);
  const auto expected = expected_gradients(*alone, group, square);
  DistributedDataParallel ddp(net, {.process_group = group});
  square(ddp, group->rank()).backward();
  require(!net->parameters()[0].grad().defined(), "a frozen parameter has no gradient");
  require_gradients(*net, expected, "frozen");
  require(ddp.logging_data().buckets.front().parameters.size() == 3, "a frozen parameter is in no bucket");
}

void life_in_the_bucket(const Group& group) {
  const auto expected = expected_gradients(*make_mlp(), group, square);
  const auto net = make_mlp();
  DistributedDataParallel ddp(net, {.process_group = group});
  auto places = [&] {
    std::vector<const void*> where;
    for (const Tensor& p : net->parameters()) where.push_back(p.grad().raw().data);
    return where;
  };
  square(ddp, group->rank()).backward();
  net->zero_grad();
  square(ddp, group->rank()).backward();  // the buckets are in their final order now
  const auto before = places();
  const void* bucket = net->parameters()[0].grad().impl()->storage->data();
  for (const Tensor& p : net->parameters())
    require(p.grad().impl()->storage->data() == bucket, "all gradients lie in one bucket");
  net->zero_grad();
  require(!net->parameters()[0].grad().defined(), "zero_grad makes gradients undefined");
  square(ddp, group->rank()).backward();
  require(places() == before, "the memory stays");
  require_gradients(*net, expected, "in the bucket");
  // Gradients put elsewhere come back.
  net->zero_grad();
  {
    const auto guard = ddp.no_sync();
    square(ddp, group->rank()).backward();
  }
  for (Tensor& p : net->parameters()) p.set_grad(p.grad().clone() * 2.0);
  square(ddp, group->rank()).backward();
  require(places() == before, "a replaced gradient moves into the bucket");
  require_gradients(*net, expected, "after set_grad", 3);
  // Clipping after backward is the same on all ranks.
  const double norm = nn::utils::clip_grad_norm_(net->parameters(), 1e-3).item<double>();
  double squares = 0;
  for (const Tensor& g : expected) squares += 9 * sum(pow(g, 2)).item<double>();
  require(std::abs(norm - std::sqrt(squares)) < 1e-9 * norm, "the norm is that of the averaged gradients");
  require(places() == before, "clipping writes in place");
}

void evaluation(const Group& group) {
  const auto net = make_mlp();
  DistributedDataParallel ddp(net, {.process_group = group});
  const auto expected = expected_gradients(*make_mlp(), group, square);
  if (group->rank() == 0) {  // no other rank need take part
    const NoGradGuard no_grad;
    ddp.eval();
    require(!ddp(input_of(0)).requires_grad(), "nothing is recorded");
    ddp.train();
  }
  square(ddp, group->rank()).backward();
  require_gradients(*net, expected, "after an evaluation");
}

// autograd::grad gives parameters nothing, so one rank alone may ask for it.
void gradients_of_inputs(const Group& group) {
  for (const bool find : {false, true}) {
    const auto alone = make_mlp(), net = make_mlp();
    const auto expected = expected_gradients(*make_mlp(), group, square);
    DistributedDataParallel ddp(net, {.process_group = group, .find_unused_parameters = find});
    if (group->rank() == 0) {
      Tensor x = input_of(0);
      x.requires_grad_();
      auto gradient = [&](nn::Module& m) { return autograd::grad({sum(pow(m(x), 2))}, {x}).front(); };
      require_close(gradient(ddp), gradient(*alone), 1e-12, "the gradient of an input");
      require(!net->parameters()[0].grad().defined(), "parameters are left alone");
    }
    square(ddp, group->rank()).backward();
    require_gradients(*net, expected, "after autograd::grad");
  }
}

// register_hook sees, and may change, what this rank has computed.
void hooks(const Group& group) {
  const auto alone = make_mlp();
  square(*alone, group->rank()).backward();
  const auto net = make_mlp();
  DistributedDataParallel ddp(net, {.process_group = group});
  Tensor seen;
  const auto handle = autograd::register_hook(net->parameters()[0], [&](const Tensor& g) {
    seen = g.clone();
    return g * 3.0;
  });
  square(ddp, group->rank()).backward();
  require_close(seen, alone->parameters()[0].grad(), 1e-12, "the local gradient");
  const auto expected = expected_gradients(*make_mlp(), group, square);
  require_close(net->parameters()[0].grad(), expected[0] * 3.0, 1e-12, "the average of what the hook returned");
  require_close(net->parameters()[1].grad(), expected[1], 1e-12, "another parameter");
}

// Two wrapped models in one backward, and one optimizer for both.
void two_models(const Group& group) {
  auto loss = [](nn::Module& f, nn::Module& g, int r) { return mean(f(input_of(r, 1)) * g(input_of(r, 2))); };
  const auto f_alone = make_mlp(float64, 1), g_alone = make_mlp(float64, 2);
  for (int r = 0; r < group->size(); ++r) (loss(*f_alone, *g_alone, r) * (1.0 / group->size())).backward();
  const auto f = make_mlp(float64, 1), g = make_mlp(float64, 2);
  DistributedDataParallel f_ddp(f, {.process_group = group}), g_ddp(g, {.process_group = group});
  std::vector<Tensor> all = f->parameters();
  for (const Tensor& p : g->parameters()) all.push_back(p);
  optim::SGD optimizer(all, {.lr = 0});
  for (int step = 0; step < 3; ++step) {
    loss(f_ddp, g_ddp, group->rank()).backward();
    for (std::size_t i = 0; i < 4; ++i) {
      require_close(f->parameters()[i].grad(), f_alone->parameters()[i].grad(), 1e-12, "the first model");
      require_close(g->parameters()[i].grad(), g_alone->parameters()[i].grad(), 1e-12, "the second model");
    }
    optimizer.step();
    optimizer.zero_grad();
  }
}

void life_of_the_wrapper(const Group& group) {
  const auto expected = expected_gradients(*make_mlp(), group, square);
  const auto net = make_mlp();
  auto ddp =
      std::make_unique<DistributedDataParallel>(net, parallel::DistributedDataParallelOptions{.process_group = group});
  Tensor loss = square(*ddp, group->rank());
  ddp.reset();
  loss.backward();
  require_gradients(*net, expected, "a backward after the wrapper is gone");
  loss = {};
  net->zero_grad();
  require(!autograd::leaf_of("test", net->parameters()[0]).destination().defined(),
          "its buckets are gone with the graph");
  const auto alone = make_mlp();
  square(*alone, group->rank()).backward();
  square(*net, group->rank()).backward();
  require_close(net->parameters()[0].grad(), alone->parameters()[0].grad(), 1e-12, "the module on its own again");
  net->zero_grad();
  DistributedDataParallel again(net, {.process_group = group});
  square(again, group->rank()).backward();
  require_gradients(*net, expected, "wrapped again");
}

void unused_parameters(const Group& group) {
  struct Branches : nn::Module {
    Tensor forward(const Tensor& x) override { return use_b ? a(x) + b(x) : a(x); }
    nn::Linear a = register_module("a", nn::Linear(6, 4)), b = register_module("b", nn::Linear(6, 4)),
               c = register_module("c", nn::Linear(6, 4));
    bool use_b = false;
  };
  const auto net = std::make_shared<Branches>();
  net->to(float64);
  fill(*net);
  DistributedDataParallel ddp(
      net, {.process_group = group, .bucket_cap_mb = 1e-5, .find_unused_parameters = true, .first_bucket_mb = 1e-5});
  for (int step = 0; step < 3; ++step) {
    net->use_b = step > 0 && group->rank() == 0;
    square(ddp, group->rank()).backward();
    require(net->a->weight.grad().defined(), "a is used");
    require(!net->c->weight.grad().defined(), "what no rank uses is left alone");
    if (step == 0) {
      require(!net->b->weight.grad().defined(), "b is not used yet");
    } else {
      Branches alone;
      alone.to(float64);
      fill(alone);
      alone.use_b = true;
      square(alone, 0).backward();
      require_close(net->b->weight.grad(), alone.b->weight.grad() * (1.0 / group->size()), 1e-12, "rank 0's share");
    }
    net->zero_grad();
  }
  // An old gradient of a parameter that no rank uses now keeps its bits; another average of it would not, once clipped.
  net->use_b = true;
  square(ddp, group->rank()).backward();
  net->b->weight.grad().mul_(0.37);
  const Tensor old = net->b->weight.grad().clone();
  net->use_b = false;
  net->a->zero_grad();
  square(ddp, group->rank()).backward();
  require(equal(net->b->weight.grad(), old), "untouched");
  net->zero_grad();
  square(ddp, group->rank()).backward();
  require(!net->b->weight.grad().defined(), "no rank uses it any more");
  // Two graphs, a backward of each: what only the second reaches is not given up in the first.
  net->zero_grad();
  const Tensor first = square(ddp, group->rank());
  net->use_b = true;
  const Tensor second = square(ddp, group->rank());
  net->use_b = false;
  const Tensor third = square(ddp, group->rank());
  first.backward();
  second.backward();
  Branches alone;
  alone.to(float64);
  fill(alone);
  alone.use_b = true;
  const auto expected = expected_gradients(alone, group, square);
  require_close(net->b->weight.grad(), expected[2], 1e-12, "the second graph");
}

void buffers(const Group& group) {
  struct Counter : nn::Module {
    Tensor forward(const Tensor& x) override {
      if (is_training()) count.add_(1 + index);
      return linear(x) * factor;
    }
    nn::Linear linear = register_module("linear", nn::Linear(6, 4));
    nn::Buffer count = register_buffer("count", zeros({2}, {.dtype = int64}));
    nn::Buffer factor = register_buffer("factor", ones({4}, {.dtype = float64}));
    int index = 0;
  };
  for (const bool broadcast : {true, false}) {
    const auto net = std::make_shared<Counter>();
    net->to(float64);
    fill(*net);
    net->index = group->rank();
    net->count.fill_(5 * group->rank());
    DistributedDataParallel ddp(net, {.process_group = group, .broadcast_buffers = broadcast});
    require(net->count.to_vector<int>().front() == 0, "rank 0's buffers at wrapping");
    for (int i = 0; i < 3; ++i) square(ddp, group->rank()).backward();
    const int own = 1 + group->rank();
    require(net->count.to_vector<int>().back() == (broadcast ? 2 + own : 3 * own),
            "rank 0's buffers, then this rank's change");
    // The graph saves what it multiplies by; values that are the same already are not written.
    const Tensor one = square(ddp, group->rank()), two = square(ddp, group->rank());
    (one + two).backward();
    if (group->rank() == 0) {  // in eval mode no other rank need take part, also where gradients are recorded
      ddp.eval();
      require(square(ddp, 0).requires_grad(), "recorded");
      ddp.train();
    }
    square(ddp, group->rank()).backward();
    const auto guard = ddp.no_sync();
    const int before = net->count.to_vector<int>().front();
    square(ddp, group->rank()).backward();
    require(net->count.to_vector<int>().front() == before + own, "no_sync leaves buffers alone");
  }
}

}  // namespace

std::vector<DdpCase> gradient_cases() {
  return {{"tied and used twice", tied_and_used_twice},
          {"several forwards", several_forwards},
          {"accumulation", accumulation},
          {"no_sync", no_sync},
          {"used only in no_sync", used_only_in_no_sync},
          {"frozen", frozen},
          {"life in the bucket", life_in_the_bucket},
          {"evaluation", evaluation},
          {"gradients of inputs", gradients_of_inputs},
          {"hooks", hooks},
          {"hooks that return views", hooks_that_return_views},
          {"two models", two_models},
          {"life of the wrapper", life_of_the_wrapper},
          {"unused parameters", unused_parameters},
          {"buffers", buffers}};
}

}  // namespace tandem::test
