// What goes wrong is an error on every rank, at once, and the next step works.
#include <optional>

#include <tandem/tests/parallel/ddp_cases.h>

namespace tandem::test {
namespace {

using parallel::DistributedDataParallel;
using parallel::DistributedDataParallelOptions;

struct FirstOnly : nn::Module {
  FirstOnly() {
    to(float64);
    fill(*this);
  }
  Tensor forward(const Tensor& x) override { return both ? b(a(x)) : a(x); }
  nn::Linear a = register_module("a", nn::Linear(2, 2)), b = register_module("b", nn::Linear(2, 2));
  bool both = true;
};

std::string rank_text(const Group& group, int rank) { return fmt::format("rank {} of {}", rank, group->size()); }

// A step that must work, with gradients that are the averages.
void require_working(FirstOnly& net, DistributedDataParallel& ddp, const Group& group) {
  net.both = true;
  net.zero_grad();
  sum(ddp(full({1, 2}, group->rank() + 1.0, {.dtype = float64}))).backward();
  FirstOnly alone;
  double mean_of_inputs = 0;
  for (int r = 0; r < group->size(); ++r) mean_of_inputs += (r + 1.0) / group->size();
  sum(alone(full({1, 2}, mean_of_inputs, {.dtype = float64}))).backward();
  for (std::size_t i = 0; i < 4; ++i)
    require_close(net.parameters()[i].grad(), alone.parameters()[i].grad(), 1e-12, "the step after an error");
  net.zero_grad();
}

// pytorch#128949: an unused parameter left its bucket unsynchronised, and the ranks drifted apart without an error.
void unused_is_an_error(const Group& group) {
  for (const double cap : {1e-6, 1.0}) {  // a bucket a parameter; one bucket
    const auto net = std::make_shared<FirstOnly>();
    DistributedDataParallel ddp(net, {.process_group = group, .bucket_cap_mb = cap, .first_bucket_mb = cap});
    const Tensor x = ones({1, 2}, {.dtype = float64});
    for (int step = 0; step < 2; ++step) {  // before and after the order is rebuilt
      net->both = false;
      require_error(
          {"'b.", "got no gradient in this backward", rank_text(group, group->rank()), "find_unused_parameters"},
          [&] { sum(ddp(x)).backward(); });
      require_working(*net, ddp, group);
      // One rank alone: the others are told.
      const int odd = group->size() - 1;
      net->both = group->rank() != odd;
      require_error({"'b.", "got no gradient in this backward", rank_text(group, odd)},
                    [&] { sum(ddp(x)).backward(); });
      require_working(*net, ddp, group);
    }
  }
}

void no_gradient_at_all(const Group& group) {
  const auto net = std::make_shared<FirstOnly>();
  DistributedDataParallel ddp(net, {.process_group = group});
  // A loss that does not go through the output synchronises nothing.
  sum(net->b(ones({1, 2}, {.dtype = float64}))).backward();
  require(net->b->weight.grad().defined() && !net->a->weight.grad().defined(), "the module on its own");
  require_working(*net, ddp, group);
}

void a_backward_that_throws(const Group& group) {
  for (const double cap : {1e-6, 1.0})
    for (const bool find : {false, true}) {
      const auto net = std::make_shared<FirstOnly>();
      DistributedDataParallel ddp(
          net, {.process_group = group, .bucket_cap_mb = cap, .find_unused_parameters = find, .first_bucket_mb = cap});
      const Tensor x = ones({1, 2}, {.dtype = float64});
      for (int step = 0; step < 2; ++step) {
        std::optional<autograd::HookHandle> hook;
        if (group->rank() == 0)
          hook =
              autograd::register_hook(net->a->weight, [](const Tensor&) -> Tensor { throw Error("spilled coffee"); });
        if (group->rank() == 0)
          require_error({"spilled coffee"}, [&] { sum(ddp(x)).backward(); });
        else
          require_error({rank_text(group, 0) + ": its backward ended with an error"}, [&] { sum(ddp(x)).backward(); });
        hook.reset();
        require_working(*net, ddp, group);
      }
    }
}

// A parameter that only the loss uses is averaged like all others, whether its gradient comes early or late.
void used_outside(const Group& group) {
  const Tensor x = full({1, 2}, group->rank() + 1.0, {.dtype = float64});
  for (const bool find : {false, true}) {
    const auto net = std::make_shared<FirstOnly>();
    DistributedDataParallel ddp(net, {.process_group = group, .find_unused_parameters = find});
    auto of_loss = [&] { return (sum(net->b->weight) + sum(net->b->bias)) * (group->rank() + 1.0); };
    auto require_average = [&] {
      const Tensor expected = full({2, 2}, (group->size() + 1) / 2.0, {.dtype = float64});
      require_close(net->b->weight.grad(), expected, 1e-12, "used in the loss alone");
    };
    net->both = false;
    const Tensor output = sum(ddp(x));
    (output + of_loss()).backward();  // the latest operations come first: b before the output
    require_average();
    require_working(*net, ddp, group);
    net->both = false;
    const Tensor early = of_loss();
    const Tensor loss = early + sum(ddp(x));
    loss.backward();
    require_average();
    require_working(*net, ddp, group);
  }
}

void backward_in_a_hook(const Group& group) {
  const auto net = std::make_shared<FirstOnly>();
  DistributedDataParallel ddp(net, {.process_group = group});
  const Tensor x = ones({1, 2}, {.dtype = float64});
  for (const bool through_the_wrapper : {true, false}) {
    const Tensor inner = sum(through_the_wrapper ? ddp(x) : net->b(x));
    const auto hook = autograd::register_hook(net->a->weight, [&](const Tensor&) {
      inner.backward();
      return Tensor();
    });
    require_error({rank_text(group, group->rank()),
                   through_the_wrapper ? "began inside another one" : "got a gradient after it had been announced"},
                  [&] { sum(ddp(x)).backward(); });
  }
  require_working(*net, ddp, group);
}

// One rank alone tries a backward inside a backward, and goes on: the outer one, and the ranks, stay in step.
void a_refused_backward_in_a_hook(const Group& group) {
  for (const bool find : {false, true}) {
    const auto net = std::make_shared<FirstOnly>();
    DistributedDataParallel ddp(
        net, {.process_group = group, .bucket_cap_mb = 1e-6, .find_unused_parameters = find, .first_bucket_mb = 1e-6});
    const Tensor x = ones({1, 2}, {.dtype = float64});
    const Tensor inner = group->rank() == 0 ? sum(ddp(x)) : Tensor();
    auto hook = autograd::register_hook(net->a->weight, [&](const Tensor&) {
      if (inner.defined())
        require_error({rank_text(group, 0), "began inside another one"}, [&] { inner.backward({}, true); });
      return Tensor();
    });
    for (int step = 0; step < 3; ++step) require_working(*net, ddp, group);
    hook.reset();
    require_working(*net, ddp, group);
  }
}

// A parameter of two wrapped models: a backward through both would average it twice at the same time.
void shared_between_wrappers(const Group& group) {
  struct Head : nn::Module {
    explicit Head(std::shared_ptr<FirstOnly> encoder) : shared(register_module("shared", std::move(encoder))) {
      own->to(float64);
    }
    Tensor forward(const Tensor& x) override { return own(shared->forward(x)); }
    std::shared_ptr<FirstOnly> shared;
    nn::Linear own = register_module("own", nn::Linear(2, 2));
  };
  const auto encoder = std::make_shared<FirstOnly>();
  const auto f = std::make_shared<Head>(encoder), g = std::make_shared<Head>(encoder);
  fill(*f, 1);
  fill(*g, 2);
  DistributedDataParallel f_ddp(f, {.process_group = group}), g_ddp(g, {.process_group = group});
  auto zero = [&] {
    f->zero_grad();
    g->zero_grad();
  };
  const Tensor x = wave({3, 2}, group->rank());
  auto own = [&](nn::Module& m) {
    zero();
    sum(pow(m(x), 2)).backward();
    const Tensor gradient = encoder->a->weight.grad().clone();
    zero();
    return gradient;
  };
  for (int step = 0; step < 3; ++step) {  // the order is rebuilt on the way
    const Tensor expected_f = average(own(*f), group), expected_g = average(own(*g), group);
    sum(pow(f_ddp(x), 2)).backward();
    require_close(encoder->a->weight.grad(), expected_f, 1e-12, "the first model's backward");
    sum(pow(g_ddp(x), 2)).backward();
    require_close(encoder->a->weight.grad(), expected_f + expected_g, 1e-12, "then the second's");
    zero();
    require_error({rank_text(group, group->rank()), "parameter 'shared.", "two wrapped models", "one after the other"},
                  [&] { (sum(f_ddp(x)) + sum(g_ddp(x))).backward(); });
    zero();
  }
}

void changed_after_wrapping(const Group& group) {
  const Tensor x = ones({1, 2}, {.dtype = float64});
  const auto net = std::make_shared<FirstOnly>();
  DistributedDataParallel ddp(net, {.process_group = group});
  auto refused = [&](const std::string& what) {
    require_error({"[DistributedDataParallel]", rank_text(group, group->rank()), what, "after the model was wrapped"},
                  [&] { ddp(x); });
    const NoGradGuard no_grad;
    if (net->a->weight.dtype() == float64) (void)ddp(x);  // an evaluation does not mind
  };
  net->b->bias.requires_grad_(false);
  refused("parameter 'b.bias' was frozen");
  net->b->bias.requires_grad_(true);
  net->to(float32);
  refused("parameter 'a.weight' was converted from float64 to float32");
  // The bucket is of another type now: without the wrapper gradients are made elsewhere.
  sum((*net)(ones({1, 2}))).backward();
  require(net->a->weight.grad().dtype() == float32, "the module on its own");
  net->zero_grad();
  net->to(float64);
  fill(*net);
  require_working(*net, ddp, group);
  net->register_module("c", nn::Linear(2, 2));
  refused("parameter 'c.weight' was added");
  const auto half = std::make_shared<FirstOnly>();
  half->a->weight.requires_grad_(false);
  DistributedDataParallel frozen(half, {.process_group = group});
  half->a->weight.requires_grad_(true);
  require_error({"parameter 'a.weight' was unfrozen"}, [&] { frozen(x); });
  half->a->weight.requires_grad_(false);
  half->b->weight.set_data(ones({3, 2}, {.dtype = float64}));
  half->b->bias.set_data(ones({3}, {.dtype = float64}));
  require_error({"parameter 'b.weight' was changed from shape"}, [&] { frozen(x); });
  sum((*half)(x)).backward();  // its place in the bucket is too small
  require(half->b->weight.grad().shape() == Shape{3, 2}, "the module on its own");
}

void construction(const Group& group) {
  auto wrap = [&](std::shared_ptr<nn::Module> net, DistributedDataParallelOptions options) {
    options.process_group = group;
    DistributedDataParallel ddp(std::move(net), options);
  };
  require_error({"the module is empty"}, [&] { wrap(nullptr, {}); });
  require_error({"device_ids has 2 entries"}, [&] { wrap(make_mlp(), {.device_ids = {"cpu:0", "cpu:1"}}); });
  require_error({"'0.weight' is on cpu:0, but device_ids says cpu:1"},
                [&] { wrap(make_mlp(), {.device_ids = {"cpu:1"}}); });
  wrap(make_mlp(), {.device_ids = {"cpu:0"}});
  require_error({"bucket_cap_mb is 0"}, [&] { wrap(make_mlp(), {.bucket_cap_mb = 0}); });
  require_error({"first_bucket_mb is -1"}, [&] { wrap(make_mlp(), {.first_bucket_mb = -1}); });
  require_error({"no parameter requires grad"}, [&] {
    const auto net = make_mlp();
    net->requires_grad_(false);
    wrap(net, {});
  });
  require_error({"contains a DataParallel;", "one device"},
                [&] { wrap(std::make_shared<parallel::DataParallel>(make_mlp()), {}); });
  const auto inner =
      std::make_shared<DistributedDataParallel>(make_mlp(), DistributedDataParallelOptions{.process_group = group});
  require_error({"[DataParallel]", "contains a DistributedDataParallel", "use one of the two"},
                [&] { parallel::DataParallel both(inner); });
  struct Hides : nn::Module {
    Tensor forward(const Tensor& x) override { return (*inner)(x); }
    std::shared_ptr<nn::Module> inner;  // not registered
  };
  const auto hides = std::make_shared<Hides>();
  hides->inner = inner;
  require_error({"[DistributedDataParallel]", "inside a replica of a DataParallel"}, [&] {
    parallel::DataParallel both(hides, {.device_ids = {"cpu:0"}, .replicas = 2});
    both(wave({4, 6}, 1));
  });
  require_error({"contains a DistributedDataParallel already"}, [&] {
    wrap(std::make_shared<DistributedDataParallel>(make_mlp(), DistributedDataParallelOptions{.process_group = group}),
         {});
  });
}

}  // namespace

std::vector<DdpCase> failure_cases() {
  return {{"unused is an error", unused_is_an_error},
          {"no gradient at all", no_gradient_at_all},
          {"a backward that throws", a_backward_that_throws},
          {"used outside", used_outside},
          {"a backward in a hook", backward_in_a_hook},
          {"a refused backward in a hook", a_refused_backward_in_a_hook},
          {"shared between wrappers", shared_between_wrappers},
          {"changed after wrapping", changed_after_wrapping},
          {"construction", construction}};
}

}  // namespace tandem::test
