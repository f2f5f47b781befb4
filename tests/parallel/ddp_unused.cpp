// find_unused_parameters: what counts as used, in graphs of every kind.
#include <tandem/tests/parallel/ddp_cases.h>

namespace tandem::test {
namespace {

using parallel::DistributedDataParallel;

// The second layer takes part when it is asked to; `cut` stops its gradient on the way.
struct Switch : nn::Module {
  Switch() {
    to(float64);
    fill(*this);
  }
  Tensor forward(const Tensor& x) override {
    const Tensor y = a(x);
    if (!use_b) return y;
    return cut ? y + Cut::apply(b(x)) : y + b(x);
  }
  struct Cut : autograd::Function<Cut> {
    Tensor forward(autograd::Context&, const Tensor& x) { return x.clone(); }
    std::vector<Tensor> backward(autograd::Context&, const std::vector<Tensor>&) { return {Tensor()}; }
  };
  nn::Linear a = register_module("a", nn::Linear(6, 4)), b = register_module("b", nn::Linear(6, 4));
  bool use_b = true, cut = false;
};

Tensor loss_of(nn::Module& model, const Group& group) { return sum(pow(model(wave({3, 6}, group->rank())), 2)); }

std::vector<Tensor> own_gradients(const Group& group, bool use_b) {
  Switch alone;
  alone.use_b = use_b;
  loss_of(alone, group).backward();
  std::vector<Tensor> gradients;
  for (const Tensor& p : alone.parameters()) gradients.push_back(p.grad());
  return gradients;
}

// What was given up by zero_grad has not been used: no zeros, which an optimizer with weight decay would step on.
void used_and_zeroed(const Group& group) {
  const auto net = std::make_shared<Switch>();
  DistributedDataParallel ddp(net, {.process_group = group, .find_unused_parameters = true});
  for (const bool failed : {false, true}) {
    net->use_b = true;
    if (failed) {
      const auto hook =
          autograd::register_hook(net->a->weight, [](const Tensor&) -> Tensor { throw Error("spilled coffee"); });
      require_error({"spilled coffee"}, [&] { loss_of(ddp, group).backward(); });
    } else {
      const auto guard = ddp.no_sync();
      loss_of(ddp, group).backward();
    }
    require(net->b->weight.grad().defined(), "the second layer was used");
    net->zero_grad();
    net->use_b = false;
    loss_of(ddp, group).backward();
    require(!net->b->weight.grad().defined(), "no rank has used it since zero_grad");
    require_close(net->a->weight.grad(), average(own_gradients(group, false)[0], group), 1e-12, "the first layer");
    net->zero_grad();
  }
}

// An old gradient keeps its bits; another average of it would not, once clipped.
void keeps_its_bits(const Group& group) {
  const auto net = std::make_shared<Switch>();
  DistributedDataParallel ddp(net, {.process_group = group, .find_unused_parameters = true});
  for (const bool cut : {false, true}) {
    net->zero_grad();
    net->use_b = true;
    net->cut = false;
    loss_of(ddp, group).backward();
    net->b->weight.grad().mul_(0.37);
    const Tensor old = net->b->weight.grad().clone();
    const Tensor other_graph = loss_of(ddp, group);  // not the one that backward goes through
    net->use_b = net->cut = cut;                     // reached, but no gradient comes
    loss_of(ddp, group).backward();
    require(equal(net->b->weight.grad(), old), "a gradient that no rank has changed keeps its bits");
  }
}

void with_a_graph_of_no_sync(const Group& group) {
  const auto net = std::make_shared<Switch>();
  DistributedDataParallel ddp(net, {.process_group = group, .find_unused_parameters = true});
  Tensor local;
  {
    const auto guard = ddp.no_sync();
    local = loss_of(ddp, group);
  }
  net->use_b = false;
  (local + loss_of(ddp, group)).backward();
  const auto both = own_gradients(group, true), one = own_gradients(group, false);
  require_close(net->a->weight.grad(), average(both[0] + one[0], group), 1e-12, "in both graphs");
  require_close(net->b->weight.grad(), average(both[2], group), 1e-12, "in the graph of no_sync alone");
}

void an_undefined_output(const Group& group) {
  struct Maybe : Switch {
    std::vector<Tensor> forward_all(std::span<const Tensor> in) override { return {a(in[0]), Tensor()}; }
  };
  const auto net = std::make_shared<Maybe>();
  DistributedDataParallel ddp(net, {.process_group = group, .find_unused_parameters = true});
  const std::vector<Tensor> out = ddp({wave({3, 6}, group->rank())});
  require(!out[1].defined(), "an undefined output stays one");
  sum(pow(out[0], 2)).backward();
  require_close(net->a->weight.grad(), average(own_gradients(group, false)[0], group), 1e-12, "the defined output");
}

}  // namespace

std::vector<DdpCase> unused_cases() {
  return {{"used and zeroed", used_and_zeroed},
          {"keeps its bits", keeps_its_bits},
          {"with a graph of no_sync", with_a_graph_of_no_sync},
          {"an undefined output", an_undefined_output}};
}

}  // namespace tandem::test
