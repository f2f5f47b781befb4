// Graphs: replayed steps equal plain ones bit for bit.
#include <tandem/tests/cuda/graph_training.h>
#include <tandem/tests/support/test.h>

#include <thread>

#include <tandem/optim/lr_scheduler.h>
#include <tandem/parallel/data_parallel.h>
#include <tandem/tensor/cuda/module.h>
#include <tandem/tensor/cuda_graph.h>
#include <tandem/tensor/random.h>

namespace tandem {
namespace {

using namespace test;

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
      a = rand({1003}, {.device = kCuda});
      b = randn({1003}, {.device = kCuda});
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
    const Tensor x = ones({1 << 18}, {.device = kCuda});
    Tensor drawn;
    cuda::Graph graph;
    const auto draw = [&] {
      { const Tensor gone = x * 2; }
      drawn = rand({50}, {.device = kCuda});
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
      (i < 5 ? few : many).push_back(randn({2}, {.dtype = float64}).to(kCuda).requires_grad_());
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
  Tensor x = arange(4, {.dtype = float32}).to(kCuda), total = zeros({4}, {.device = kCuda}), twice;
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
  const Tensor leaf = ones({4}, {.device = kCuda, .requires_grad = true});
  const Tensor product = leaf * total;
  graph.replay();
  CHECK_ERROR(product.backward(ones_like(product)), "changed");
}

TEST_CASE("cuda: memory of a graph: kept for replays, used again within, given back at the end") {
  const MemoryStats before = memory_stats(kCuda);
  constexpr std::int64_t kMany = 1 << 20;  // 4 MiB; real pools grow by 32 MiB
  {
    auto graph = std::make_unique<cuda::Graph>(kCuda);
    Tensor result;
    {
      Tensor x = ones({kMany}, {.device = kCuda});
      Tensor old = x * 3;
      graph->capture([&] {
        result = x * 1;
        for (int i = 0; i < 20; ++i) result = result + old;
        old = Tensor();  // freed in the capture, and read by each replay
      });
    }
    const Tensor other = full({kMany}, 7.0, {.device = kCuda});  // does not get the memory of x or old
    CHECK(memory_stats(kCuda).reserved < before.reserved + (std::size_t{64} << 20));
    const MemoryStats first = memory_stats(kCuda);
    for (int i = 0; i < 12; ++i) graph->replay();
    CHECK(memory_stats(kCuda).in_use == first.in_use);
    CHECK(memory_stats(kCuda).reserved == first.reserved);
    CHECK(result.to_vector<float>() == std::vector<float>(kMany, 61));
    graph.reset();
    CHECK(result.to_vector<float>() == std::vector<float>(kMany, 61));  // a tensor keeps its memory
    CHECK(memory_stats(kCuda).in_use == before.in_use + 8 * kMany);
  }
  empty_cache();
  CHECK(memory_stats(kCuda).in_use == before.in_use);
  CHECK(memory_stats(kCuda).reserved <= before.reserved);
}

TEST_CASE("cuda: memory for what the host changes is given back with its graph, also of a capture that fails") {
  Training t;
  t.warm_up();
  empty_cache();
  const MemoryStats before = memory_stats(kCuda);
  for (int i = 0; i < 3; ++i) {
    t.capture();
    t.graph.replay();
    t.graph = cuda::Graph(kCuda);
    CHECK_ERROR(t.graph.capture([&] {
      rand({5}, {.device = kCuda});
      throw Error("of the body's own");
    }),
                "own");
    t.step();
  }
  empty_cache();
  CHECK(memory_stats(kCuda).reserved <= before.reserved);
}

TEST_CASE("cuda: training by a graph takes no memory from replay to replay") {
  Training t;
  t.warm_up();
  t.capture();
  t.next_batch();
  t.graph.replay();
  const MemoryStats first = memory_stats(kCuda);
  for (int i = 0; i < 50; ++i) {
    t.next_batch();
    t.graph.replay();
  }
  cuda::synchronize(kCuda);
  CHECK(memory_stats(kCuda).in_use == first.in_use);
  CHECK(memory_stats(kCuda).reserved == first.reserved);
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
  Tensor x = ones({100}, {.device = kCuda}), y, z;
  auto first = std::make_unique<cuda::Graph>(kCuda);
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
  Tensor x = ones({100}, {.device = kCuda}), y;
  cuda::Graph graph;
  std::vector<float> seen;
  graph.capture([&] {
    y = x + 1;
    std::thread([&] { seen = (zeros({100}, {.device = kCuda}) + 5).to_vector<float>(); }).join();
  });
  CHECK(seen == std::vector<float>(100, 5));
  graph.replay();
  CHECK(y.to_vector<float>() == std::vector<float>(100, 2));
}

TEST_CASE("cuda: checks at each replay, before its work, in the order of the capture") {
  Tensor x = zeros({1}, {.device = kCuda});
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

}  // namespace
}  // namespace tandem
