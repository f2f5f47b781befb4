// The registry: names, each tensor once, training mode, moving, and how modules are called and printed.
#include <tandem/autograd/grad_mode.h>
#include <tandem/nn/layers.h>
#include <tandem/nn/sequential.h>
#include <tandem/tests/support/test.h>

#include <thread>

using namespace tandem;
using Names = std::vector<std::string>;

namespace {

// Names and order as torch.nn.Module(...).state_dict() has them for the same model.
struct Net : nn::Module {
  Net() {
    head = register_module("head", nn::Linear(8, 3));
    scale = register_parameter("scale", ones({8}));
    calls = register_buffer("calls", zeros({}));
    stack = register_module(
        "stack", nn::Sequential(nn::Linear(8, 8), nn::ReLU(), nn::Sequential(nn::Linear(8, 2, {.bias = false}))));
    register_module("tied", head);
  }
  std::vector<Tensor> forward_all(std::span<const Tensor> in) override {
    Tensor a = relu(stack->at<nn::LinearImpl>(0)(in[0])), b = stack->at<nn::LinearImpl>(0)(in[1]);
    calls.add_(1);
    return {head(a * scale + b), a};
  }
  nn::Linear head{nullptr};
  nn::Sequential stack{nullptr};
  nn::Parameter scale;
  nn::Buffer calls;
};

struct Silent : nn::Module {};

struct Doubler : nn::Module {
  Tensor forward(const Tensor& x) override { return x * 2; }
};

struct Register : nn::Module {
  using nn::Module::register_wrapped;
};

template <class Pairs>
Names names_of(const Pairs& pairs) {
  Names out;
  for (const auto& [name, item] : pairs) out.push_back(name);
  return out;
}

}  // namespace

TEST_CASE("names and order are PyTorch's, and a tied tensor appears once") {
  Net net;
  CHECK(names_of(net.named_parameters()) ==
        Names{"scale", "head.weight", "head.bias", "stack.0.weight", "stack.0.bias", "stack.2.0.weight"});
  CHECK(names_of(net.named_buffers()) == Names{"calls"});
  CHECK(names_of(net.named_modules()) == Names{"", "head", "stack", "stack.0", "stack.1", "stack.2", "stack.2.0"});
  CHECK(names_of(net.named_children()) == Names{"head", "stack", "tied"});
  CHECK(names_of(net.state_dict()) == Names{"scale", "calls", "head.weight", "head.bias", "stack.0.weight",
                                            "stack.0.bias", "stack.2.0.weight", "tied.weight", "tied.bias"});
  CHECK(net.parameters().size() == 6);
  CHECK(net.buffers().size() == 1);
  CHECK(net.modules().size() == 7);
  CHECK(net.modules().front() == &net);
  CHECK(net.children().size() == 3);
  CHECK(net.parameters()[0].identity() == net.scale.identity());
  CHECK(net.state_name() == "model");
}

TEST_CASE("a tensor registered twice is one parameter") {
  Register both;
  nn::Linear a(4, 4);
  both.register_module("a", a);
  const nn::Parameter again = both.register_parameter("again", a->weight);
  CHECK(again.identity() == a->weight.identity());
  CHECK(names_of(both.named_parameters()) == Names{"again", "a.bias"});
}

TEST_CASE("registration returns what it was given and checks names") {
  Register m;
  const nn::Linear layer(2, 3);
  CHECK(m.register_module("layer", layer).ptr() == layer.ptr());
  auto shared = std::make_shared<Doubler>();
  std::shared_ptr<Doubler> same = m.register_module("shared", shared);
  CHECK(same == shared);
  const nn::Parameter w = m.register_parameter("w", ones({2}));
  CHECK(w.requires_grad());
  CHECK_FALSE(m.register_parameter("fixed", ones({2}), false).requires_grad());
  CHECK_FALSE(m.register_buffer("b", ones({2})).requires_grad());

  CHECK_ERROR(m.register_parameter("", ones({1})), "[register_parameter]", "the name is empty", "in Register");
  CHECK_ERROR(m.register_buffer("a.b", ones({1})), "[register_buffer]", "'a.b' contains a dot", "leave it out");
  CHECK_ERROR(m.register_buffer("w", ones({1})), "Register already has a parameter named 'w'", "another name");
  CHECK_ERROR(m.register_parameter("b", ones({1})), "already has a buffer named 'b'");
  CHECK_ERROR(m.register_parameter("layer", ones({1})), "already has a module named 'layer'");
  CHECK_ERROR(m.register_module("w", layer), "[register_module]", "already has a parameter named 'w'");
  CHECK_ERROR(m.register_module("", layer), "the name is empty");
  CHECK_ERROR(m.register_module("x.y", layer), "contains a dot");
  CHECK_ERROR(m.register_module("none", nn::Linear(nullptr)), "'none' is an empty handle", "nn::Linear(2, 3)");
  CHECK_ERROR(m.register_module("none", std::shared_ptr<Doubler>()), "'none' is an empty handle");
  CHECK_ERROR(m.register_parameter("none", Tensor()), "the tensor of 'none' is undefined");
  CHECK_ERROR(m.register_buffer("none", Tensor()), "the tensor of 'none' is undefined");
  CHECK_ERROR(m.register_parameter("counts", zeros({2}, {.dtype = int64})), "'counts' is int64", "as a buffer");
  CHECK_ERROR(m.register_parameter("made", w * 2), "'made' was computed by a recorded operation", "detach()");
  CHECK_ERROR(m.register_buffer("grad", w), "'grad' requires grad", "as a parameter");
  CHECK(m.state_dict().size() == 5);  // nothing was added by the failures

  auto outer = std::make_shared<Register>(), inner = std::make_shared<Register>();
  outer->register_module("inner", inner);
  CHECK_ERROR(inner->register_module("outer", outer), "'outer' contains Register itself");
  CHECK_ERROR(outer->register_module("self", outer), "'self' contains Register itself");
}

TEST_CASE("what is registered is dense") {
  Register m;
  const nn::Parameter p = m.register_parameter("p", rand({2, 3}).t());
  CHECK(p.is_contiguous());
  CHECK(p.is_leaf());
  CHECK(p.shape() == Shape{3, 2});
  nn::Buffer b = m.register_buffer("b", ones({1}).expand({4}));
  b.add_(1);
  CHECK(b.to_vector<int>() == std::vector<int>{2, 2, 2, 2});
}

TEST_CASE("parameters and buffers are handles that cannot be replaced by mistake") {
  static_assert(!std::is_assignable_v<nn::Parameter&, Tensor>);
  static_assert(!std::is_assignable_v<nn::Buffer&, Tensor>);
  static_assert(std::is_assignable_v<nn::Parameter&, nn::Parameter>);
  static_assert(std::is_convertible_v<Tensor, nn::Parameter>);
  static_assert(!std::is_copy_constructible_v<Net> && !std::is_move_constructible_v<Net>);
  static_assert(!std::is_copy_assignable_v<Net> && !std::is_move_assignable_v<Net>);
  static_assert(!std::is_default_constructible_v<nn::Linear>);
}

TEST_CASE("each of forward and forward_all stands in for the other") {
  Net net;
  const Tensor x = ones({2, 8});
  const std::vector<Tensor> out = net({x, x});
  CHECK(out.size() == 2);
  CHECK(out[0].shape() == Shape{2, 3});
  CHECK(net(std::vector<Tensor>{x, x}).size() == 2);
  CHECK(net.calls.item<int>() == 2);

  Doubler twice;
  CHECK(twice({ones({1})}).at(0).item<int>() == 2);
  CHECK(twice(ones({1})).item<int>() == 2);
  CHECK_ERROR(twice({x, x}), "Doubler was called with 2 tensors", "override forward_all");

  Silent silent;
  CHECK_ERROR(silent(x), "[forward] Silent overrides neither forward nor forward_all");
  CHECK_ERROR(silent({x}), "[forward] Silent overrides neither forward nor forward_all");
  CHECK_ERROR(silent({x, x}), "Silent was called with 2 tensors");

  struct Pair : nn::Module {
    std::vector<Tensor> forward_all(std::span<const Tensor> in) override { return {in[0], in[0]}; }
  };
  Pair pair;
  CHECK_ERROR(pair(x), "Pair returned 2 tensors", "module({x})");
  CHECK_ERROR(silent(x), "overrides neither");  // also after another error

  struct Outer : nn::Module {  // a default forward inside a default forward
    std::vector<Tensor> forward_all(std::span<const Tensor> in) override { return inner->forward_all(in); }
    std::shared_ptr<nn::Module> inner = register_module("inner", std::make_shared<Doubler>());
  };
  CHECK(Outer()(ones({1})).item<int>() == 2);
}

TEST_CASE("a weight used twice gets both contributions") {
  Net net;
  const Tensor x = ones({2, 8});
  sum(net({x, x})[0]).backward();
  CHECK(net.stack->at<nn::LinearImpl>(0).weight.grad().defined());
  CHECK_FALSE(net.stack->at<nn::SequentialImpl>(2).at<nn::LinearImpl>(0).weight.grad().defined());
  net.zero_grad();
  for (const Tensor& p : net.parameters()) CHECK_FALSE(p.grad().defined());
}

TEST_CASE("train, eval, apply and requires_grad_ reach every module once") {
  Net net;
  CHECK(net.is_training());
  net.eval();
  for (const nn::Module* m : net.modules()) CHECK_FALSE(m->is_training());
  net.train();
  for (const nn::Module* m : net.modules()) CHECK(m->is_training());

  Names order;
  net.apply([&](nn::Module& m) { order.push_back(m.name()); });
  CHECK(order == Names{"Linear", "Linear", "ReLU", "Linear", "Sequential", "Sequential", "Net"});

  net.requires_grad_(false);
  for (const Tensor& p : net.parameters()) CHECK_FALSE(p.requires_grad());
  Register m;
  m.register_parameter("mask", zeros({2}, {.dtype = int64}), false);
  m.register_parameter("w", zeros({2}), false);
  m.requires_grad_();
  CHECK_FALSE(m.parameters()[0].requires_grad());
  CHECK(m.parameters()[1].requires_grad());
}

TEST_CASE("to converts in place: handles, ties and gradients stay") {
  Net net;
  const nn::Parameter weight = net.head->weight;
  const std::vector<float> before = weight.to_vector<float>();
  Tensor index = net.register_buffer("index", arange(3));
  sum(net({ones({2, 8}), ones({2, 8})})[0]).backward();
  const std::vector<float> gradient = weight.grad().to_vector<float>();

  net.to(float64);
  CHECK(weight.dtype() == float64);
  CHECK(net.head->weight.identity() == weight.identity());
  CHECK(weight.grad().dtype() == float64);
  CHECK(weight.grad().to_vector<float>() == gradient);
  CHECK(weight.to_vector<float>() == before);
  CHECK(weight.requires_grad());
  CHECK(net.calls.dtype() == float64);
  CHECK(index.dtype() == int64);  // only floating tensors are converted
  CHECK(net.parameters().size() == 6);
  sum(net({ones({2, 8}, {.dtype = float64}), ones({2, 8}, {.dtype = float64})})[0]).backward();
  CHECK(weight.grad().to_vector<float>()[0] == doctest::Approx(2 * gradient[0]));

  CHECK_ERROR(net.to(bfloat16), "[to]", "float32 or float64, not bfloat16");
  CHECK_ERROR(net.to(int64), "not int64");
  CHECK(weight.dtype() == float64);

  set_cpu_device_count(2);
  net.to("cpu:1");
  CHECK(weight.device() == Device("cpu:1"));
  CHECK(weight.grad().device() == Device("cpu:1"));
  CHECK(index.device() == Device("cpu:1"));
  const std::uint32_t version = weight.version();
  net.to("cpu:1");
  CHECK(weight.version() == version);  // nothing to do, nothing done
  CHECK_ERROR(net.to("cpu:7"), "cpu:7");
  CHECK(weight.device() == Device("cpu:1"));
  net.to("cpu");
  set_cpu_device_count(1);
  CHECK(weight.device() == Device("cpu"));
  CHECK(weight.to_vector<float>() == before);
}

TEST_CASE("backward through a parameter that was changed after forward is an error") {
  nn::Linear layer(2, 2);
  const Tensor y = sum(layer(layer(ones({1, 2}))));
  {
    const NoGradGuard no_grad;
    layer->weight.add_(1);
  }
  CHECK_ERROR(y.backward(), "[linear]", "changed in place");
}

TEST_CASE("several threads call one module") {
  nn::Sequential net(nn::Linear(16, 16), nn::ReLU(), nn::Linear(16, 4));
  const Tensor x = rand({8, 16});
  const std::vector<float> expected = net(x).to_vector<float>();
  std::array<std::vector<float>, 4> results;
  std::vector<std::thread> threads;
  for (auto& result : results) threads.emplace_back([&] { result = net(x).to_vector<float>(); });
  for (std::thread& t : threads) t.join();
  for (const auto& result : results) CHECK(result == expected);
}

TEST_CASE("a wrapper's names are those of what it wraps") {
  auto net = std::make_shared<Net>();
  Register wrapper;
  wrapper.register_wrapped(net);
  CHECK(names_of(wrapper.named_parameters()) == names_of(net->named_parameters()));
  CHECK(names_of(wrapper.state_dict()) == names_of(net->state_dict()));
  CHECK(wrapper.str().starts_with("Register(\n  (module): Net(\n    (head): Linear("));
  CHECK_ERROR(wrapper.register_wrapped(net), "[register_wrapped]", "holds one module and nothing else");
}

TEST_CASE("the tree is printed as PyTorch prints it") {
  Net net;
  const std::string expected =
      "Net(\n"
      "  (head): Linear(in_features=8, out_features=3, bias=True)\n"
      "  (stack): Sequential(\n"
      "    (0): Linear(in_features=8, out_features=8, bias=True)\n"
      "    (1): ReLU()\n"
      "    (2): Sequential(\n"
      "      (0): Linear(in_features=8, out_features=2, bias=False)\n"
      "    )\n"
      "  )\n"
      "  (tied): Linear(in_features=8, out_features=3, bias=True)\n"
      ")";
  CHECK(net.str() == expected);
  CHECK(fmt::format("{}", net) == expected);
  CHECK(fmt::format("{}", net.head) == "Linear(in_features=8, out_features=3, bias=True)");
  CHECK(fmt::format("{}", nn::ReLU(nullptr)) == "(empty)");

  struct Named : nn::Module {
    std::string name() const override { return "Mine"; }
    std::string extra() const override { return "depth=2"; }
  };
  Named named;
  CHECK(named.str() == "Mine(depth=2)");
  named.register_module("a", nn::ReLU());
  CHECK(named.str() == "Mine(\n  depth=2\n  (a): ReLU()\n)");
}

TEST_CASE("holders share their module") {
  const nn::Linear a(2, 3);
  nn::Linear b(nullptr);
  CHECK_FALSE(static_cast<bool>(b));
  CHECK_ERROR(b(ones({1, 2})), "this module handle is empty", "register_module");
  CHECK_ERROR(b->weight, "this module handle is empty");
  b = a;
  CHECK(static_cast<bool>(b));
  CHECK(b.ptr() == a.ptr());
  CHECK(&*b == a.get());
  const std::shared_ptr<nn::Module> module = a;
  CHECK(module == a.ptr());
  CHECK(nn::Linear(std::make_shared<nn::LinearImpl>(2, 3))->weight.shape() == Shape{3, 2});
  CHECK(a({ones({1, 2})}).size() == 1);
  CHECK(a(std::vector<Tensor>{ones({1, 2})}).size() == 1);
  nn::Sequential s(a), copy(s);  // a copy of the handle, not a Sequential in a Sequential
  CHECK(copy.ptr() == s.ptr());
}
