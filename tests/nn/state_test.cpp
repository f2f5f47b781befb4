// State dictionaries: what loads, and what is refused as a whole.
#include <tandem/nn/layers.h>
#include <tandem/nn/sequential.h>
#include <tandem/tests/support/test.h>

using namespace tandem;

namespace {

nn::Sequential make_net() { return nn::Sequential(nn::Linear(3, 4), nn::ReLU(), nn::Linear(4, 2)); }

NamedTensors copy_of(const NamedTensors& state) {
  NamedTensors out;
  for (const auto& [name, tensor] : state) out.emplace_back(name, tensor.detach().clone());
  return out;
}

bool same(const NamedTensors& a, const NamedTensors& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i].first != b[i].first || !equal(a[i].second, b[i].second)) return false;
  return true;
}

}  // namespace

TEST_CASE("values are copied into the tensors that are there") {
  const nn::Sequential a = make_net(), b = make_net();
  const Tensor weight = b->at<nn::LinearImpl>(0).weight;
  const std::uint32_t version = weight.version();
  CHECK_FALSE(same(a->state_dict(), b->state_dict()));
  CHECK(b->state_problems(a->state_dict()).empty());
  b->load_state_dict(a->state_dict());
  CHECK(same(a->state_dict(), b->state_dict()));
  CHECK(weight.version() > version);
  CHECK(weight.requires_grad());
  CHECK(weight.is_leaf());
  CHECK(b->at<nn::LinearImpl>(0).weight.identity() == weight.identity());
  CHECK(weight.impl()->storage != a->at<nn::LinearImpl>(0).weight.impl()->storage);
  b->load_state_dict(b->state_dict());
  CHECK(same(a->state_dict(), b->state_dict()));
}

TEST_CASE("loading between forward and backward is an error of backward") {
  const nn::Sequential net = make_net();
  const Tensor loss = sum(net(ones({1, 3})));
  net->load_state_dict(make_net()->state_dict());
  CHECK_ERROR(loss.backward(), "[linear]", "changed in place");
}

TEST_CASE("all mismatches are in one error, and the model is unchanged") {
  const nn::Sequential net = make_net();
  const NamedTensors before = copy_of(net->state_dict());
  NamedTensors state;
  state.emplace_back("0.weight", ones({4, 5}));
  state.emplace_back("0.bias", ones({4}));
  state.emplace_back("2.weight", ones({2, 4}, {.dtype = float64}));
  state.emplace_back("extra", ones({1}));
  state.emplace_back("nothing", Tensor());
  state.emplace_back("0.bias", ones({4}));
  CHECK_ERROR(net->load_state_dict(state), "[load_state_dict] the state does not fit Sequential, which is unchanged:",
              "\n  missing: '2.bias' float32 {2}", "\n  unexpected: 'extra'", "\n  unexpected: 'nothing'",
              "\n  shape of '0.weight': file has {4, 5}, model has {4, 3}",
              "\n  dtype of '2.weight': file has float64, model has float32; convert it with .to(float32)",
              "\n  undefined: 'nothing' has no tensor", "\n  repeated: '0.bias'", "Load the state of the same model");
  CHECK(same(net->state_dict(), before));
  CHECK(net->state_problems(state).size() == 7);
  CHECK_ERROR(net->load_state_dict(state, false), "shape of '0.weight'", "dtype of '2.weight'");
  CHECK(same(net->state_dict(), before));
}

TEST_CASE("without strict, missing and unexpected entries are passed over and returned") {
  const nn::Sequential net = make_net();
  const NamedTensors before = copy_of(net->state_dict());
  const NamedTensors state{{"0.bias", full({4}, 7.0)}, {"other", ones({1})}};
  CHECK_ERROR(net->load_state_dict(state), "missing: '0.weight'", "unexpected: 'other'", "pass strict = false");
  CHECK(same(net->state_dict(), before));
  const std::vector<std::string> skipped = net->load_state_dict(state, false);
  CHECK(skipped == std::vector<std::string>{"missing: '0.weight' float32 {4, 3}", "missing: '2.weight' float32 {2, 4}",
                                            "missing: '2.bias' float32 {2}", "unexpected: 'other'"});
  CHECK(equal(net->state_dict()[1].second, full({4}, 7.0)));
  CHECK(equal(net->state_dict()[0].second, before[0].second));
}

TEST_CASE("a tied tensor is loaded under any of its names") {
  const nn::Linear layer(2, 2, {.bias = false});
  const nn::Sequential net(layer, layer);
  CHECK(net->state_dict().size() == 2);
  net->load_state_dict({{"1.weight", ones({2, 2})}});
  CHECK(equal(layer->weight, ones({2, 2})));
  net->load_state_dict({{"0.weight", zeros({2, 2})}, {"1.weight", zeros({2, 2})}});
  CHECK(equal(layer->weight, zeros({2, 2})));
  CHECK_ERROR(net->load_state_dict({{"0.weight", zeros({2, 2})}, {"1.weight", ones({2, 2})}}),
              "values of '0.weight' and '1.weight' differ, but in the model they are one tensor");
  CHECK_ERROR(net->load_state_dict(NamedTensors{}), "missing: '0.weight'", "missing: '1.weight'");
  CHECK(equal(layer->weight, zeros({2, 2})));
}

TEST_CASE("buffers are state, and values cross devices") {
  struct Counter : nn::Module {
    nn::Buffer count = register_buffer("count", zeros({}, {.dtype = int64}));
  };
  set_cpu_device_count(2);
  Counter a, b;
  b.to("cpu:1");
  a.count.add_(5);
  b.load_state_dict(a.state_dict());
  CHECK(b.count.item<int>() == 5);
  CHECK(b.count.device() == Device("cpu:1"));
  set_cpu_device_count(1);
}
