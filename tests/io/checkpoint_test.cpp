// Saving and loading objects: alone, and several in one file with the random state.
#include <tandem/tensor/io/checkpoint.h>

#include <tandem/tensor/io/safetensors.h>
#include <tandem/tensor/random.h>

#include "support.h"

using namespace tandem;
using namespace tandem::test;

namespace {

// A holder as modules have them.
struct Holder {
  std::shared_ptr<Thing> object;
  Thing* operator->() const { return object.get(); }
};

Thing make_model(float value) {
  return {"model", {{"0.weight", full({2, 3}, value).requires_grad_()}, {"0.bias", full({2}, value)}}};
}
Thing make_optimizer(float value) {
  return {"optimizer", {{"step", tensor(int64_t{5})}, {"momentum.0", full({2, 3}, value)}}};
}
std::vector<double> values(Thing& thing) {
  std::vector<double> out;
  for (const auto& [name, t] : thing.state_dict())
    for (const double value : t.to_vector<double>()) out.push_back(value);
  return out;
}
std::vector<std::string> names(const NamedTensors& state) {
  std::vector<std::string> out;
  for (const auto& [name, t] : state) out.push_back(name);
  return out;
}

}  // namespace

TEST_CASE("one object is saved under its plain names and restored") {
  const Directory directory;
  const std::string path = directory / "model.safetensors";
  Thing model = make_model(3), other = make_model(0);
  save(model, path);
  const Safetensors file = read_safetensors(path);
  CHECK(names(file.tensors) == std::vector<std::string>{"0.weight", "0.bias"});
  CHECK(file.metadata == std::map<std::string, std::string>{{"format", "pt"}});
  const std::uint32_t version = other[1].version();
  load(other, path);
  CHECK(values(other) == values(model));
  CHECK(other[0].requires_grad());
  CHECK(other[1].version() > version);
}

TEST_CASE("objects, constants, pointers, holders and paths are accepted") {
  const Directory directory;
  const std::string path = directory / "f";
  auto shared = std::make_shared<Thing>(make_model(2));
  const auto unique = std::make_unique<Thing>(make_optimizer(2));
  const Thing constant = make_model(4);
  const Holder holder{shared};
  save(shared, path);
  save(*shared, std::filesystem::path(path));
  save(shared.get(), path);
  save(constant, path);
  save(holder, path);
  load(holder, path);
  Progress progress;
  save(path, {holder, unique, progress});
  load(path, {shared, *unique, &progress}, {.map_location = "cpu"});
  load(path, {*shared});
  load(shared, std::filesystem::path(path), {.map_location = "cpu"});
  CHECK((*shared)[1].to_vector<float>() == std::vector<float>{2, 2});
  std::shared_ptr<Thing> null;
  CHECK_ERROR(save(null, path), "null pointer");
  CHECK_ERROR(load(path, {shared, null}), "null pointer");
  CHECK_ERROR(save(path, {}), "nothing to save");
  CHECK_ERROR(load(path, {}), "nothing to load");
}

TEST_CASE("several objects and the random state are restored from one file") {
  const Directory directory;
  const std::string path = directory / "checkpoint.safetensors";
  Thing model = make_model(3), optimizer = make_optimizer(4);
  Progress progress;
  progress.epoch = 2;
  progress.batch = 17;
  progress.step = int64_t{1} << 60;
  progress.numbers = {{"loss sum", 0.1}, {"best", -1e300}};
  manual_seed(0xfedcba9876543210);
  rand({1000});
  {
    const RandomStream stream(3);
    rand({10});
  }
  save(path, {model, optimizer, progress});
  const Tensor next = rand({4});
  CHECK(names(read_safetensors(path).tensors) ==
        std::vector<std::string>{"model.0.weight", "model.0.bias", "optimizer.step", "optimizer.momentum.0",
                                 "progress.epoch", "progress.batch", "progress.step", "progress.numbers.best",
                                 "progress.numbers.loss sum", "random.seed", "random.positions"});

  manual_seed(1);
  Thing new_model = make_model(0), new_optimizer = make_optimizer(0);
  Progress new_progress;
  new_progress.numbers = {{"stale", 1}};
  load(path, {new_model, new_optimizer, new_progress});
  CHECK(values(new_model) == values(model));
  CHECK(values(new_optimizer) == values(optimizer));
  CHECK(new_progress.epoch == 2);
  CHECK(new_progress.batch == 17);
  CHECK(new_progress.step == int64_t{1} << 60);
  CHECK(new_progress.numbers == progress.numbers);
  CHECK(random_state().seed == 0xfedcba9876543210);
  CHECK(random_state().positions.size() == 4);
  CHECK(equal(rand({4}), next));
}

TEST_CASE("one part can be loaded from a file with several, and leaves the random state alone") {
  const Directory directory;
  const std::string path = directory / "f";
  Thing model = make_model(3), optimizer = make_optimizer(4);
  save(path, {model, optimizer});
  manual_seed(77);
  Thing fresh = make_model(0);
  load(fresh, path);
  CHECK(values(fresh) == values(model));
  Thing fresh_optimizer = make_optimizer(0);
  load(fresh_optimizer, path);
  CHECK(values(fresh_optimizer) == values(optimizer));
  CHECK(random_state().seed == 77);
  Progress progress;
  CHECK_ERROR(load(progress, path), "progress: the file has only the parts model, optimizer");
}

TEST_CASE("two objects of a kind get names") {
  const Directory directory;
  const std::string path = directory / "gan";
  Thing a = make_model(1), b = make_model(2);
  save(path, {{"generator", a}, {"discriminator", b}});
  Thing c = make_model(0), d = make_model(0);
  load(path, {{"discriminator", d}, {"generator", c}});
  CHECK(values(c) == values(a));
  CHECK(values(d) == values(b));
  load({"discriminator", c}, path);
  CHECK(values(c) == values(b));
  CHECK_ERROR(save(path, {a, b}), "two parts are called \"model\"", "{{\"generator\", a}, {\"discriminator\", b}}");
  CHECK_ERROR(load(path, {a, b}), "two parts are called \"model\"");
  for (const char* name : {"", "a.b", "a,b", "random"}) {
    Thing bad(name, {{"x", ones({1})}});
    CHECK_ERROR(save(path, {bad}), "cannot be the name of a part", "choose one");
  }
}

// pytorch#165873, PR#8619: a vector was loaded into a scalar, broadcastable shapes were accepted, sizes were swapped in
// the message, and the model was left half loaded.
TEST_CASE("what does not fit is listed in one error, and nothing changes") {
  const Directory directory;
  const std::string path = directory / "f";
  Thing model("model",
              {{"scalar", tensor({1.0, 2.0})}, {"wide", ones({1, 64})}, {"extra", ones({1})}, {"ok", ones({2})}});
  Thing optimizer("optimizer", {{"step", tensor({1, 2})}});
  Progress progress;
  progress.epoch = 9;
  save(path, {model, optimizer, progress});
  Thing other("model",
              {{"scalar", tensor(0.0)}, {"wide", zeros({32, 64})}, {"missing", zeros({3})}, {"ok", zeros({2})}});
  Thing other_optimizer("optimizer", {{"step", tensor(0)}});
  Thing scheduler("scheduler", {{"step", tensor(0)}});
  Progress other_progress;
  manual_seed(5);
  const auto before = values(other);
  CHECK_ERROR(load(path, {other_progress, other, other_optimizer, scheduler}), path.c_str(), "nothing was changed",
              "\n  model: scalar has shape {2} in what is loaded, but {} here",
              "\n  model: wide has shape {1, 64} in what is loaded, but {32, 64} here",
              "\n  model: missing of shape {3} is missing", "\n  model: extra of shape {1} is unknown here",
              "\n  optimizer: step has shape {2} in what is loaded, but {} here",
              "\n  scheduler: the file has only the parts model, optimizer, progress");
  CHECK_ERROR(load(other, path), "wide has shape {1, 64} in what is loaded, but {32, 64} here", "extra");
  CHECK(values(other) == before);
  CHECK(other_progress.epoch == 0);
  CHECK(random_state().seed == 5);
}

TEST_CASE("strict = false takes what both have") {
  const Directory directory;
  Thing saved("model", {{"a", ones({2})}, {"b", ones({2})}});
  save(saved, directory / "f");
  Thing other("model", {{"a", zeros({2})}, {"c", full({1}, 7)}});
  CHECK_ERROR(load(other, directory / "f"), "b of shape {2} is unknown here", "c of shape {1} is missing");
  load(other, directory / "f", {.strict = false});
  CHECK(values(other) == std::vector<double>{1, 1, 7});
  Thing misfit("model", {{"a", zeros({3})}});
  CHECK_ERROR(load(misfit, directory / "f", {.strict = false}), "a has shape {2} in what is loaded, but {3} here");
}

TEST_CASE("values are loaded where the object lives, whatever map_location says") {
  set_cpu_device_count(2);
  const Directory directory;
  Thing model("model", {{"a", tensor({1.0, 2.0}).to("cpu:1")}});
  save(model, directory / "f");
  model[0].zero_();
  load(model, directory / "f", {.map_location = "cpu:0"});
  CHECK(model[0].device() == Device("cpu:1"));
  CHECK(values(model) == std::vector<double>{1, 2});
  CHECK_ERROR(load(model, directory / "f", {.map_location = "cpu:9"}), "cpu:9");
  set_cpu_device_count(1);
}

TEST_CASE("several objects cannot come from a file of one") {
  const Directory directory;
  Thing model = make_model(1), optimizer = make_optimizer(1);
  save(model, directory / "f");
  load(directory / "f", {model});
  CHECK_ERROR(load(directory / "f", {model, optimizer}), "holds the state of one object, but 2 are to be loaded");
}

TEST_CASE("a file whose random state is damaged changes nothing") {
  const Directory directory;
  const std::string path = directory / "f";
  const auto load_with = [&](const NamedTensors& random) {
    NamedTensors entries = {{"model.x", ones({1})}};
    entries.insert(entries.end(), random.begin(), random.end());
    write_safetensors(path, entries, {{"tandem.parts", "model"}});
    Thing model("model", {{"x", zeros({1})}});
    const std::string error = error_of([&] { load(path, {model}); });
    CHECK(values(model) == std::vector<double>{error == "no error" ? 1.0 : 0.0});
    return error;
  };
  const Tensor seed = tensor(1), positions = tensor({1, 2});
  CHECK(load_with({{"random.seed", seed}, {"random.positions", positions}}) == "no error");
  CHECK(contains(load_with({{"random.seed", seed}}), "random.positions must be there"));
  CHECK(contains(load_with({{"random.positions", positions}}), "random.seed must be there"));
  CHECK(contains(load_with({{"random.seed", tensor(1.0)}, {"random.positions", positions}}), "random.seed"));
  CHECK(contains(load_with({{"random.seed", seed}, {"random.positions", zeros({kMaxStreams + 1}, {.dtype = int64})}}),
                 "at most 4096 numbers"));
}

TEST_CASE("progress rejects what is not progress") {
  Progress progress;
  progress.step = 3;
  NamedTensors state = progress.state_dict();
  state[0].second = tensor(0.5);
  state.emplace_back("numbers.x", tensor({1.0, 2.0}));
  state.emplace_back("other", tensor(1));
  state.pop_back();
  state.emplace_back("other", tensor(1));
  state[1].first = "step";
  CHECK_ERROR(progress.load_state_dict(state), "nothing was changed", "epoch is float32, but must be a whole number",
              "numbers.x has shape {2} in what is loaded, but {} here", "other of shape {} is unknown here",
              "batch of shape {} is missing", "step is given twice");
  CHECK(progress.step == 3);
  CHECK(progress.numbers.empty());
}
