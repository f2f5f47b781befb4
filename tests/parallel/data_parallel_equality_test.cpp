// Training with DataParallel against one device: same weights after 20 steps, and the same bits in every run.
#include <algorithm>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>

#include <tandem/tests/parallel/virtual_devices.h>

using namespace tandem;
using namespace tandem::test;

namespace {

using OptimizerPtr = std::unique_ptr<optim::Optimizer>;
struct Method {
  const char* name;
  OptimizerPtr (*make)(std::vector<Tensor>);
};
const Method kMethods[] = {
    {"SGD",
     [](std::vector<Tensor> p) -> OptimizerPtr {
       return std::make_unique<optim::SGD>(std::move(p), optim::SGDOptions{.lr = 0.1});
     }},
    {"SGD with momentum",
     [](std::vector<Tensor> p) -> OptimizerPtr {
       return std::make_unique<optim::SGD>(
           std::move(p), optim::SGDOptions{.lr = 0.05, .momentum = 0.9, .dampening = 0.1, .weight_decay = 1e-2});
     }},
    {"Nesterov",
     [](std::vector<Tensor> p) -> OptimizerPtr {
       return std::make_unique<optim::SGD>(std::move(p),
                                           optim::SGDOptions{.lr = 0.05, .momentum = 0.9, .nesterov = true});
     }},
    {"Adam",
     [](std::vector<Tensor> p) -> OptimizerPtr {
       return std::make_unique<optim::Adam>(std::move(p), optim::AdamOptions{.lr = 1e-2, .weight_decay = 1e-2});
     }},
    {"AdamW",
     [](std::vector<Tensor> p) -> OptimizerPtr {
       return std::make_unique<optim::AdamW>(std::move(p), optim::AdamWOptions{.lr = 1e-2});
     }},
    {"amsgrad",
     [](std::vector<Tensor> p) -> OptimizerPtr {
       return std::make_unique<optim::Adam>(std::move(p), optim::AdamOptions{.lr = 1e-2, .amsgrad = true});
     }},
};

struct Batch {
  Tensor x, y;
};

// The same 20 batches in every training.
std::vector<Batch> batches(int64_t rows, DType dtype) {
  manual_seed(3);
  std::vector<Batch> all;
  for (int i = 0; i < 20; ++i) all.push_back({randn({rows, 6}, {.dtype = dtype}), randint(0, 4, {rows})});
  return all;
}

template <class Loss>
std::vector<Tensor> train(nn::Module& net, const std::vector<Batch>& data, const Method& method, const Loss& loss) {
  const OptimizerPtr optimizer = method.make(net.parameters());
  for (const Batch& batch : data) {
    loss(batch.x, batch.y).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  return net.parameters();
}

// Trains three times: the plain module, criterion(model(x), y) and model.loss(criterion, x, y).
void compare(const std::vector<Batch>& data, const Method& method, const nn::Loss& criterion,
             const parallel::DataParallelOptions& options, DType dtype, double tolerance) {
  const auto alone = make_net(dtype), net = make_net(dtype), with_loss = make_net(dtype);
  parallel::DataParallel model(net, options), loss_model(with_loss, options);
  const auto expected = train(*alone, data, method, [&](auto& x, auto& y) { return criterion((*alone)(x), y); });
  check_equal_weights(train(*net, data, method, [&](auto& x, auto& y) { return criterion(model(x), y); }), expected,
                      tolerance);
  check_equal_weights(
      train(*with_loss, data, method, [&](auto& x, auto& y) { return loss_model.loss(criterion, x, y); }), expected,
      tolerance);
}

}  // namespace

TEST_CASE("every optimizer has the weights of one device after 20 steps") {
  for (const int devices : {1, 2, 3, 4})
    for (const Method& method : kMethods) {
      CAPTURE(devices);
      CAPTURE(method.name);
      const Devices count(devices);
      compare(batches(13, float64), method, nn::CrossEntropyLoss(), {}, float64, 1e-10);
    }
}

TEST_CASE("plain SGD in float32") {
  for (const int devices : {1, 2, 3, 4}) {
    CAPTURE(devices);
    const Devices count(devices);
    compare(batches(13, float32), kMethods[0], nn::CrossEntropyLoss(), {}, float32, 1e-5);
  }
}

// pytorch#19540 (replicas without gradient edges never train); #15161, #52260, #16432 (9 rows on 4 devices, 36 on 7,
// 3 on 8).
TEST_CASE("batch sizes that do not divide, class weights and ignored labels") {
  for (const auto& [batch, count_of_devices] : {std::pair{8, 2}, {9, 4}, {36, 7}, {3, 8}, {1, 4}, {13, 3}, {5, 1}}) {
    const int rows = batch, devices = count_of_devices;  // clang 14 captures no structured bindings
    CAPTURE(rows);
    CAPTURE(devices);
    const Devices count(devices);
    const Tensor weight = tensor({1.0, 0.5, 2.0, 0.0}, {.dtype = float64});
    compare(batches(rows, float64), kMethods[3],
            nn::CrossEntropyLoss({.weight = weight, .ignore_index = 1, .label_smoothing = 0.1}), {}, float64, 1e-10);
  }
}

TEST_CASE("a part whose labels are all ignored, and a batch of such") {
  const Devices count(3);
  auto data = batches(9, float64);
  for (Batch& batch : data) batch.y.narrow(0, 3, 3).fill_(-100);
  data[4].y.fill_(-100);
  compare(data, kMethods[3], nn::CrossEntropyLoss(), {}, float64, 1e-10);
}

TEST_CASE("sums, and squares with several numbers a row") {
  const Devices count(3);
  compare(batches(7, float64), kMethods[3], nn::CrossEntropyLoss({.reduction = Reduction::sum}), {}, float64, 1e-10);
  auto data = batches(7, float64);
  for (Batch& batch : data) batch.y = randn({7, 4}, {.dtype = float64});
  compare(data, kMethods[1], nn::MSELoss(), {}, float64, 1e-10);
}

TEST_CASE("more replicas than devices, and parts of given sizes") {
  for (const int devices : {1, 2, 3}) {
    CAPTURE(devices);
    const Devices count(devices);
    compare(batches(10, float64), kMethods[3], nn::CrossEntropyLoss(), {.replicas = 4}, float64, 1e-10);
    compare(batches(10, float64), kMethods[3], nn::CrossEntropyLoss(), {.replicas = 3, .part_sizes = {5, 0, 3}},
            float64, 1e-10);
  }
}

namespace {

// Draws random numbers, and takes its time.
struct Restless : nn::Module {
  Tensor forward(const Tensor& x) override {
    const auto pause = std::chrono::steady_clock::now().time_since_epoch().count() / 64 % 4;
    std::this_thread::sleep_for(std::chrono::microseconds(pause * 100));
    return last(dropout(relu(first(x))));
  }
  nn::Linear first = register_module("first", nn::Linear(6, 512));  // wide: the step is cut within parameters
  nn::Dropout dropout = register_module("dropout", nn::Dropout(0.5));
  nn::Linear last = register_module("last", nn::Linear(512, 4));
};

std::vector<Tensor> train_restless(const parallel::DataParallelOptions& options) {
  const auto data = batches(10, float32);
  manual_seed(11);
  auto net = std::make_shared<Restless>();
  parallel::DataParallel model(net, options);
  const nn::CrossEntropyLoss criterion;
  return train(*net, data, kMethods[3], [&](auto& x, auto& y) { return model.loss(criterion, x, y); });
}

}  // namespace

TEST_CASE("ten runs have the same bits, random numbers included, whichever replica is late") {
  const Devices count(3);
  const auto expected = train_restless({});
  for (int run = 1; run < 10; ++run) check_same_bits(train_restless({}), expected);
}

TEST_CASE("a replica's bits do not depend on the device that has it") {
  const Threads threads(1);
  std::vector<Tensor> expected;
  for (const int devices : {1, 2, 3, 4}) {
    const Devices count(devices);
    const auto weights = train_restless({.replicas = 4});
    if (expected.empty()) expected = weights;
    check_same_bits(weights, expected);
  }
}

TEST_CASE("the step that devices divide has the bits of the whole step") {
  const Devices count(3);
  for (const Method& method : kMethods) {
    CAPTURE(method.name);
    auto divided = std::make_shared<nn::LinearImpl>(97, 83), whole = std::make_shared<nn::LinearImpl>(97, 83);
    whole->load_state_dict(divided->state_dict());
    parallel::DataParallel model(divided);
    const OptimizerPtr a = method.make(divided->parameters()), b = method.make(whole->parameters());
    for (int i = 0; i < 3; ++i) {
      mean(model(randn({6, 97}))).backward();
      REQUIRE(divided->weight.identity()->replicas->devices.size() == 3);
      for (std::size_t k = 0; k < 2; ++k) whole->parameters()[k].set_grad(divided->parameters()[k].grad().clone());
      a->step();
      b->step();
      check_same_bits(divided->parameters(), whole->parameters());
      a->zero_grad();
    }
    const auto state = a->state_dict(), other = b->state_dict();
    for (std::size_t k = 0; k < state.size(); ++k) CHECK(equal(state[k].second, other[k].second));
  }
}

TEST_CASE("each device's thread steps its share of the parameters") {
  // Notes which parts of which memory it is called with, and on which threads.
  struct Recorder : optim::Optimizer {
    struct Call {
      std::thread::id thread;
      const void* parameter = nullptr;
      const void* gradient = nullptr;
      int64_t count = 0;
    };
    explicit Recorder(std::vector<Tensor> parameters) { append_group(std::move(parameters)); }
    std::string name() const override { return "Recorder"; }
    optim::Settings settings(std::size_t) const override { return {{"lr", 1.0}}; }
    void set_settings(std::size_t, std::span<const double>) override {}
    std::string settings_problem(std::span<const double>) const override { return {}; }
    std::vector<std::string> buffer_names(std::span<const double>) const override { return {}; }
    void update(std::size_t, std::span<const Update> updates) override {
      const std::lock_guard lock(mutex);
      for (const Update& update : updates)
        calls.push_back(
            {std::this_thread::get_id(), update.parameter.data, update.gradient.data, update.parameter.numel()});
    }
    std::mutex mutex;
    std::vector<Call> calls;
  };
  const Devices count(3);
  auto net = std::make_shared<nn::LinearImpl>(96, 64, nn::LinearOptions{.bias = false});
  parallel::DataParallel model(net);
  Recorder optimizer(net->parameters());
  mean(model(randn({6, 96}))).backward();
  optimizer.step();
  REQUIRE(optimizer.calls.size() == 3);
  std::sort(optimizer.calls.begin(), optimizer.calls.end(),
            [](const auto& a, const auto& b) { return a.parameter < b.parameter; });
  std::set<std::thread::id> threads;
  const auto* parameter = static_cast<const float*>(net->weight.raw().data);
  const auto* gradient = static_cast<const float*>(net->weight.grad().raw().data);
  for (const Recorder::Call& call : optimizer.calls) {
    CHECK(call.count == 96 * 64 / 3);
    CHECK(call.parameter == parameter);
    CHECK(call.gradient == gradient);
    parameter += call.count;
    gradient += call.count;
    threads.insert(call.thread);
  }
  CHECK(threads.size() == 3);
}

TEST_CASE("one optimizer for a model on two devices, one on three, and a plain one") {
  const Devices count(3);
  std::vector<std::shared_ptr<nn::SequentialImpl>> nets, plain;
  for (int i = 0; i < 3; ++i) {
    nets.push_back(make_net());
    plain.push_back(make_net());
  }
  parallel::DataParallel two(nets[0], {.device_ids = {0, 1}}), three(nets[1]);
  auto all = [](const auto& models) {
    std::vector<Tensor> parameters;
    for (const auto& net : models)
      for (const Tensor& p : net->parameters()) parameters.push_back(p);
    return parameters;
  };
  optim::Adam a(all(nets)), b(all(plain));
  for (const Batch& batch : batches(5, float64)) {
    (sum(two(batch.x)) + sum(three(batch.x)) + sum((*nets[2])(batch.x))).backward();
    (sum((*plain[0])(batch.x)) + sum((*plain[1])(batch.x)) + sum((*plain[2])(batch.x))).backward();
    a.step();
    b.step();
    a.zero_grad();
    b.zero_grad();
  }
  check_equal_weights(a.parameters(), b.parameters());
}
