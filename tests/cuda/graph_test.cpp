// Graphs: replayed steps equal plain ones bit for bit, and what cannot be captured is an error that leaves all usable.
#include <tandem/tests/support/test.h>

#include <thread>

#include <tandem/autograd/grad_mode.h>
#include <tandem/nn/layers.h>
#include <tandem/nn/loss.h>
#include <tandem/optim/adam.h>
#include <tandem/optim/lr_scheduler.h>
#include <tandem/optim/sgd.h>
#include <tandem/parallel/data_parallel.h>
#include <tandem/tensor/cuda.h>
#include <tandem/tensor/cuda/module.h>
#include <tandem/tensor/cuda_graph.h>
#include <tandem/tensor/random.h>
#include <tandem/tensor/threads.h>

namespace tandem {
namespace {

const Device kDevice{DeviceType::cuda, 0}, kOther{DeviceType::cuda, 1};
const bool kSeveral = cuda::device_count() > 1;  // a real machine may have one

struct Net : nn::Module {
  std::shared_ptr<nn::LinearImpl> first = register_module("first", std::make_shared<nn::LinearImpl>(8, 16));
  std::shared_ptr<nn::DropoutImpl> drop = register_module("drop", std::make_shared<nn::DropoutImpl>(0.3));
  std::shared_ptr<nn::LinearImpl> last = register_module("last", std::make_shared<nn::LinearImpl>(16, 5));
  Tensor forward(const Tensor& x) override { return (*last)((*drop)(relu((*first)(x)))); }
};

enum class Method { sgd, momentum, adam, amsgrad, adamw };
std::unique_ptr<optim::Optimizer> make_optimizer(Method method, std::vector<Tensor> parameters) {
  if (method == Method::sgd) return std::make_unique<optim::SGD>(parameters, optim::SGDOptions{.lr = 0.05});
  if (method == Method::momentum)
    return std::make_unique<optim::SGD>(parameters,
                                        optim::SGDOptions{.lr = 0.05, .momentum = 0.9, .weight_decay = 0.01});
  if (method == Method::adamw)
    return std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions{.lr = 0.02, .weight_decay = 0.1});
  return std::make_unique<optim::Adam>(parameters,
                                       optim::AdamOptions{.lr = 0.02, .amsgrad = method == Method::amsgrad});
}

// A model, its data on the device, and a step of it.
struct Training {
  explicit Training(Method method = Method::adam) {
    net->to(kDevice);
    optimizer = make_optimizer(method, net->parameters());
  }
  void next_batch() {
    x.copy_(randn({6, 8}));
    y.copy_(randint(0, 5, {6}));
  }
  void step() {
    optimizer->zero_grad();
    loss = criterion((*net)(x), y);
    loss.backward();
    optimizer->step();
  }
  void warm_up() {
    for (int i = 0; i < 3; ++i) {
      next_batch();
      step();
    }
  }
  void capture() {
    graph.capture([this] { step(); });
  }

  std::shared_ptr<Net> net = std::make_shared<Net>();
  std::unique_ptr<optim::Optimizer> optimizer;
  nn::CrossEntropyLoss criterion;
  Tensor x = zeros({6, 8}, {.device = kDevice}), y = zeros({6}, {.dtype = int64, .device = kDevice}), loss;
  cuda::Graph graph{kDevice};
};

// All that training leaves after some steps: losses, parameters, the optimizer's and the random numbers' state.
std::vector<double> train(Method method, bool with_graph, bool with_schedule) {
  manual_seed(11);
  Training t(method);
  optim::CosineAnnealingLR schedule(*t.optimizer, 8);
  t.warm_up();
  if (with_graph) t.capture();
  std::vector<double> seen;
  for (int i = 0; i < 9; ++i) {
    t.next_batch();
    if (with_graph)
      t.graph.replay();
    else
      t.step();
    for (const double value : t.loss.to_vector<double>()) seen.push_back(value);
    if (with_schedule) schedule.step();
  }
  t.optimizer->set_lr(0.5);
  t.next_batch();
  with_graph ? t.graph.replay() : t.step();
  t.step();  // plain ones may follow
  for (const auto& [name, value] : t.optimizer->state_dict())
    for (const double number : value.to_vector<double>()) seen.push_back(number);
  for (const Tensor& p : t.net->parameters())
    for (const double number : p.to_vector<double>()) seen.push_back(number);
  for (const std::uint64_t position : random_state().positions) seen.push_back(static_cast<double>(position));
  return seen;
}

TEST_CASE("cuda: replayed steps equal plain ones, bit for bit") {
  for (const Method method : {Method::sgd, Method::momentum, Method::adam, Method::amsgrad, Method::adamw})
    for (const bool with_schedule : {false, true}) {
      CAPTURE(static_cast<int>(method));
      CAPTURE(with_schedule);
      CHECK(train(method, true, with_schedule) == train(method, false, with_schedule));
    }
}

TEST_CASE("cuda: draws go on in the streams of their capture") {
  const auto run = [](bool with_graph) {
    manual_seed(7);
    Tensor a, b;
    cuda::Graph graph;
    const auto draw_both = [&] {
      const RandomStream stream(3);
      a = rand({1003}, {.device = kDevice});
      b = randn({1003}, {.device = kDevice});
    };
    if (with_graph) graph.capture(draw_both);
    std::vector<float> seen;
    for (int i = 0; i < 3; ++i) {
      with_graph ? graph.replay() : draw_both();
      for (const Tensor& drawn : {a, b})
        for (const float value : drawn.to_vector<float>()) seen.push_back(value);
      rand({3});
    }
    for (const std::uint64_t position : random_state().positions) seen.push_back(static_cast<float>(position));
    return seen;
  };
  CHECK(run(true) == run(false));
}

TEST_CASE("cuda: the graph's own temporaries do not lie where the host's numbers are") {
  const auto run = [](bool with_graph) {
    manual_seed(6);
    const Tensor x = ones({1 << 18}, {.device = kDevice});
    Tensor drawn;
    cuda::Graph graph;
    const auto draw = [&] {
      { const Tensor gone = x * 2; }
      drawn = rand({50}, {.device = kDevice});
    };
    if (with_graph) graph.capture(draw);
    std::vector<float> seen;
    for (int i = 0; i < 2; ++i) {
      with_graph ? graph.replay() : draw();
      for (const float value : drawn.to_vector<float>()) seen.push_back(value);
    }
    return seen;
  };
  CHECK(run(true) == run(false));
}

TEST_CASE("cuda: steps of many parameters, in groups of their own") {
  const auto run = [](bool with_graph) {
    manual_seed(8);
    std::vector<Tensor> few, many;
    for (int i = 0; i < 1000; ++i)  // more than a kernel takes, and than a page of slots
      (i < 5 ? few : many).push_back(randn({2}, {.dtype = float64}).to(kDevice).requires_grad_());
    optim::Adam optimizer({{.params = few}, {.params = many, .lr = 0.02}}, {.lr = 0.1});
    cuda::Graph graph;
    const auto step = [&] {
      for (const std::vector<Tensor>* all : {&few, &many})
        for (Tensor p : *all) p.set_grad(p.detach() * 2);
      optimizer.step();
    };
    step();
    if (with_graph) graph.capture(step);
    for (int i = 0; i < 3; ++i) {
      optimizer.set_lr(1, 0.03 / (i + 1));
      with_graph ? graph.replay() : step();
    }
    std::vector<float> seen;
    for (const std::vector<Tensor>* all : {&few, &many})
      for (const Tensor& p : *all)
        for (const float value : p.to_vector<float>()) seen.push_back(value);
    return seen;
  };
  CHECK(run(true) == run(false));
}

TEST_CASE("cuda: DataParallel in a graph: on one device, but not on several") {
  const auto run = [](bool with_graph) {
    manual_seed(12);
    Training t;
    parallel::DataParallel model(t.net, {.device_ids = {0}});
    const auto step = [&] {
      t.optimizer->zero_grad();
      t.loss = t.criterion(model(t.x), t.y);
      t.loss.backward();
      t.optimizer->step();
    };
    t.next_batch();
    step();
    if (with_graph) t.graph.capture(step);
    t.next_batch();
    with_graph ? t.graph.replay() : step();
    CHECK(model.phases().forward >= 0);
    return t.loss.to_vector<float>();
  };
  CHECK(run(true) == run(false));
  if (!kSeveral) return;
  Training t;
  parallel::DataParallel model(t.net, {.device_ids = {0, 1}});
  model(t.x);
  CHECK_ERROR(t.graph.capture([&] { model(t.x); }), "a graph records one device");
  CHECK(model(t.x).shape() == Shape{6, 5});
}

TEST_CASE("cuda: a capture runs nothing and counts nothing") {
  Training t;
  t.warm_up();
  const std::vector<float> w = t.net->first->weight.to_vector<float>();
  const std::vector<std::uint64_t> positions = random_state().positions;
  const NamedTensors state = t.optimizer->state_dict();
  CHECK_FALSE(t.graph.captured());
  t.capture();
  CHECK(t.graph.captured());
  CHECK(t.net->first->weight.to_vector<float>() == w);
  CHECK(random_state().positions == positions);
  const NamedTensors after = t.optimizer->state_dict();
  REQUIRE(after.size() == state.size());
  for (std::size_t i = 0; i < state.size(); ++i)
    CHECK(after[i].second.to_vector<double>() == state[i].second.to_vector<double>());
}

TEST_CASE("cuda: each replay reads the fixed tensors anew, and counts as a change of what it writes") {
  Tensor x = arange(4, {.dtype = float32}).to(kDevice), total = zeros({4}, {.device = kDevice}), twice;
  cuda::Graph graph;
  graph.capture([&] {
    twice = x * 2;
    total.add_(twice);
  });
  CHECK(total.to_vector<float>() == std::vector<float>(4));
  graph.replay();
  graph.replay();
  CHECK(total.to_vector<float>() == std::vector<float>{0, 4, 8, 12});
  x.fill_(1);
  const std::uint32_t version = total.version(), twice_version = twice.version(), x_version = x.version();
  graph.replay();
  CHECK(twice.to_vector<float>() == std::vector<float>{2, 2, 2, 2});
  CHECK(total.version() > version);
  CHECK(twice.version() > twice_version);
  CHECK(x.version() == x_version);
  const Tensor leaf = ones({4}, {.device = kDevice, .requires_grad = true});
  const Tensor product = leaf * total;
  graph.replay();
  CHECK_ERROR(product.backward(ones_like(product)), "changed");
}

TEST_CASE("cuda: memory of a graph: kept for replays, used again within, given back at the end") {
  const MemoryStats before = memory_stats(kDevice);
  constexpr std::int64_t kMany = 1 << 20;  // 4 MiB; real pools grow by 32 MiB
  {
    auto graph = std::make_unique<cuda::Graph>(kDevice);
    Tensor result;
    {
      Tensor x = ones({kMany}, {.device = kDevice});
      Tensor old = x * 3;
      graph->capture([&] {
        result = x * 1;
        for (int i = 0; i < 20; ++i) result = result + old;
        old = Tensor();  // freed in the capture, and read by each replay
      });
    }
    const Tensor other = full({kMany}, 7.0, {.device = kDevice});  // does not get the memory of x or old
    CHECK(memory_stats(kDevice).reserved < before.reserved + (std::size_t{64} << 20));
    const MemoryStats first = memory_stats(kDevice);
    for (int i = 0; i < 12; ++i) graph->replay();
    CHECK(memory_stats(kDevice).in_use == first.in_use);
    CHECK(memory_stats(kDevice).reserved == first.reserved);
    CHECK(result.to_vector<float>() == std::vector<float>(kMany, 61));
    graph.reset();
    CHECK(result.to_vector<float>() == std::vector<float>(kMany, 61));  // a tensor keeps its memory
    CHECK(memory_stats(kDevice).in_use == before.in_use + 8 * kMany);
  }
  empty_cache();
  CHECK(memory_stats(kDevice).in_use == before.in_use);
  CHECK(memory_stats(kDevice).reserved <= before.reserved);
}

TEST_CASE("cuda: memory for what the host changes is given back with its graph, also of a capture that fails") {
  Training t;
  t.warm_up();
  empty_cache();
  const MemoryStats before = memory_stats(kDevice);
  for (int i = 0; i < 3; ++i) {
    t.capture();
    t.graph.replay();
    t.graph = cuda::Graph(kDevice);
    CHECK_ERROR(t.graph.capture([&] {
      rand({5}, {.device = kDevice});
      throw Error("of the body's own");
    }),
                "own");
    t.step();
  }
  empty_cache();
  CHECK(memory_stats(kDevice).reserved <= before.reserved);
}

TEST_CASE("cuda: training by a graph takes no memory from replay to replay") {
  Training t;
  t.warm_up();
  t.capture();
  t.next_batch();
  t.graph.replay();
  const MemoryStats first = memory_stats(kDevice);
  for (int i = 0; i < 50; ++i) {
    t.next_batch();
    t.graph.replay();
  }
  cuda::synchronize(kDevice);
  CHECK(memory_stats(kDevice).in_use == first.in_use);
  CHECK(memory_stats(kDevice).reserved == first.reserved);
}

TEST_CASE("cuda: two graphs at once, in any order") {
  const auto run = [](bool with_graphs) {
    manual_seed(4);
    Training a(Method::adam), b(Method::momentum);
    for (Training* t : {&a, &b}) {
      t->warm_up();
      if (with_graphs) t->capture();
    }
    std::vector<float> seen;
    for (const int which : {0, 1, 1, 0, 0, 1}) {
      Training& t = which == 0 ? a : b;
      t.next_batch();
      with_graphs ? t.graph.replay() : t.step();
    }
    for (Training* t : {&a, &b})
      for (const Tensor& tensor : {t->loss, Tensor(t->net->first->weight)})
        for (const float value : tensor.to_vector<float>()) seen.push_back(value);
    return seen;
  };
  CHECK(run(true) == run(false));
}

TEST_CASE("cuda: a graph can be destroyed while another is captured") {
  Tensor x = ones({100}, {.device = kDevice}), y, z;
  auto first = std::make_unique<cuda::Graph>(kDevice);
  first->capture([&] { y = x + 1; });
  first->replay();
  cuda::Graph second;
  second.capture([&] {
    first.reset();
    z = y * 2;
    y = Tensor();
  });
  second.replay();
  CHECK(z.to_vector<float>() == std::vector<float>(100, 4));
}

TEST_CASE("cuda: other threads work on while one captures") {
  Tensor x = ones({100}, {.device = kDevice}), y;
  cuda::Graph graph;
  std::vector<float> seen;
  graph.capture([&] {
    y = x + 1;
    std::thread([&] { seen = (zeros({100}, {.device = kDevice}) + 5).to_vector<float>(); }).join();
  });
  CHECK(seen == std::vector<float>(100, 5));
  graph.replay();
  CHECK(y.to_vector<float>() == std::vector<float>(100, 2));
}

TEST_CASE("cuda: checks at each replay, before its work, in the order of the capture") {
  Tensor x = zeros({1}, {.device = kDevice});
  cuda::Graph graph;
  std::string order;
  CHECK_ERROR(cuda::module("test").at_replay([] {}), "no graph is being captured");
  graph.capture([&] {
    cuda::module("test").at_replay([&] { order += 'a'; });
    x.add_(1);
    cuda::module("test").at_replay([&] { order += 'b'; });
  });
  CHECK(order.empty());
  graph.replay();
  graph.replay();
  CHECK(order == "abab");
  CHECK(x.item<int>() == 2);
}

TEST_CASE("cuda: a replay that is refused has no effect") {
  Training t;
  Tensor w = ones({4}, {.device = kDevice, .requires_grad = true});
  optim::Adam last({w});
  const auto step = [&] {
    t.step();
    w.set_grad(w.detach() * 2);
    last.step();
  };
  step();
  bool broken = false;
  t.graph.capture([&] {
    step();
    cuda::module("test").at_replay([&] { check(!broken, "test", "broken"); });
  });
  const auto host = [&] {
    std::vector<double> seen;
    for (const std::uint64_t position : random_state().positions) seen.push_back(static_cast<double>(position));
    for (const optim::Optimizer* optimizer : {t.optimizer.get(), static_cast<optim::Optimizer*>(&last)})
      for (const auto& [name, value] : optimizer->state_dict())
        for (const double number : value.to_vector<double>()) seen.push_back(number);
    for (const Tensor& p : t.net->parameters()) seen.push_back(p.version());
    seen.push_back(w.version());
    return seen;
  };
  t.graph.replay();
  const std::vector<double> before = host();
  broken = true;
  CHECK_ERROR(t.graph.replay(), "broken");
  CHECK(host() == before);
  broken = false;
  last.load_state_dict(last.state_dict());
  CHECK_ERROR(t.graph.replay(), "other memory");
  CHECK(host() == before);
}

TEST_CASE("cuda: the backward of what a graph computes belongs into the graph") {
  Tensor w = ones({3}, {.device = kDevice, .requires_grad = true}), loss;
  cuda::Graph graph;
  graph.capture([&] { loss = sum(exp(w)); });
  graph.replay();
  CHECK_ERROR(loss.backward(), "[exp] backward needs a tensor", "if a cuda::Graph computed it",
              "capture the backward in that graph");
}

TEST_CASE("cuda: tensors that are made in a capture") {
  Tensor labels = tensor({2, 0}, {.device = kDevice}), made;
  cuda::Graph graph;
  graph.capture([&] {
    made = one_hot(labels, 3).to(float32) + arange(0.5, 2.6, 1, {.device = kDevice}) +
           eye(3, {.device = kDevice}).select(0, 1);
  });
  graph.replay();
  CHECK(made.to_vector<float>() == std::vector<float>{0.5, 2.5, 3.5, 1.5, 2.5, 2.5});
  labels.copy_(tensor({1, 1}));
  graph.replay();
  CHECK(made.to_vector<float>() == std::vector<float>{0.5, 3.5, 2.5, 0.5, 3.5, 2.5});
}

TEST_CASE("cuda: what cannot be captured is an error, after which all is usable") {
  const auto run = [](bool with_errors) {
    manual_seed(8);
    Training t;
    t.warm_up();
    if (with_errors) {
      const Tensor on_host = ones({6, 8}), pinned = cuda::pin_memory(on_host),
                   elsewhere = ones({3}, {.device = kSeveral ? kOther : kDevice});
      CHECK_ERROR(t.graph.replay(), "nothing was captured");
      const auto refused = [&](auto&& body, const char* text) {
        const auto whole = [&] {
          const Tensor y = t.x * 2;  // something has been captured already
          body();
        };
        CHECK_ERROR(t.graph.capture(whole), text);
        CHECK_FALSE(t.graph.captured());
      };
      refused([&] { t.x.select(0, 0).select(0, 0).item<float>(); }, "read them after replay()");
      refused([&] { t.x.to("cpu"); }, "read them after replay()");
      refused([&] { (void)t.x.str(); }, "read them after replay()");
      refused([&] { on_host.to(kDevice); }, "values are copied from the host");
      refused([&] { pinned.to(kDevice, true); }, "values are copied from the host");
      refused([&] { t.x.copy_(on_host); }, "values are copied from the host");
      refused([&] { randperm(5, {.device = kDevice}); }, "[randperm] an order is made on the host and copied");
      refused([&] { cuda::synchronize(kDevice); }, "nothing runs that could be waited for");
      refused([&] { empty_cache(); }, "memory cannot be given back");
      refused([&] { cuda::pin_memory(ones({12345})); }, "page-locked memory cannot be made");
      if (kSeveral) refused([&] { elsewhere + 1; }, "work for cuda:1 while a graph of cuda:0 is captured");
      if (kSeveral) refused([&] { t.x.to(kOther); }, "work for cuda:1");
      refused([&] { empty({std::int64_t{1} << 40}, {.device = kDevice}); }, "out of memory on cuda:0");
      refused([&] { throw Error("of the body's own"); }, "of the body's own");
      refused([&] { cuda::Graph().capture([] {}); }, "this thread is capturing a graph already");
      void* const event = cuda::module("test").record_time(0);
      const auto ignore_error = [&] {
        try {
          cuda::module("test").seconds_between(event, event);
        } catch (const Error&) {
        }
      };
      refused(ignore_error, "cannot be captured, and its error was ignored");
      cuda::module("test").release_time(event);
      cuda::Graph good;
      good.capture([&] { t.x + 1; });
      refused([&] { good.replay(); }, "cannot be replayed while this thread captures");
      const std::vector<Device> devices{kDevice, kOther};
      if (kSeveral) refused([&] { run_on_devices(devices, [](int) {}); }, "work is divided among 2 devices");
      CHECK_ERROR(good.capture([] {}), "holds a capture already");
      CHECK_ERROR(t.graph.capture([&] { on_host + 1; }), "gave no work to cuda:0");
      good = cuda::Graph(kDevice);
      CHECK_FALSE(good.captured());
      Training fresh;
      CHECK_ERROR(fresh.capture(), "parameter 0 has no state yet");
      fresh.optimizer->zero_grad();
    }
    manual_seed(9);
    t.next_batch();
    t.step();
    t.capture();
    t.next_batch();
    t.graph.replay();
    return t.loss.to_vector<float>();
  };
  CHECK(run(true) == run(false));
}

TEST_CASE("cuda: a graph is of one CUDA device") {
  CHECK_ERROR(cuda::Graph("cpu"), "cpu:0 is no CUDA device");
  CHECK_ERROR(cuda::Graph("cuda:9"), "cuda:9 does not exist");
}

TEST_CASE("cuda: a graph outlives neither its optimizer nor the memory of its parameters") {
  Training t;
  t.warm_up();
  t.capture();
  SUBCASE("the optimizer is gone") {
    t.optimizer.reset();
    CHECK_ERROR(t.graph.replay(), "is gone");
  }
  SUBCASE("the model has moved") {
    t.net->to("cpu");
    CHECK_ERROR(t.graph.replay(), "other memory");
  }
  SUBCASE("a state was loaded") {
    t.optimizer->load_state_dict(t.optimizer->state_dict());
    CHECK_ERROR(t.graph.replay(), "other memory");
  }
  SUBCASE("a state of before the first step was loaded") {
    t.optimizer->load_state_dict(make_optimizer(Method::adam, t.net->parameters())->state_dict());
    CHECK_ERROR(t.graph.replay(), "other memory");
    CHECK(t.optimizer->state_dict().size() < 10);
  }
  t.graph = cuda::Graph(kDevice);
}

}  // namespace
}  // namespace tandem
