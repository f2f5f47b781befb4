// What a graph refuses, in a capture or at a replay: an error that leaves all usable.
#include <tandem/tests/cuda/graph_training.h>
#include <tandem/tests/support/test.h>

#include <tandem/tensor/cuda/module.h>
#include <tandem/tensor/cuda_graph.h>
#include <tandem/tensor/random.h>
#include <tandem/tensor/threads.h>

namespace tandem {
namespace {

using namespace test;

TEST_CASE("cuda: a replay that is refused has no effect") {
  Training t;
  Tensor w = ones({4}, {.device = kCuda, .requires_grad = true});
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
  Tensor w = ones({3}, {.device = kCuda, .requires_grad = true}), loss;
  cuda::Graph graph;
  graph.capture([&] { loss = sum(exp(w)); });
  graph.replay();
  CHECK_ERROR(loss.backward(), "[exp] backward needs a tensor", "if a cuda::Graph computed it",
              "capture the backward in that graph");
}

TEST_CASE("cuda: tensors that are made in a capture") {
  Tensor labels = tensor({2, 0}, {.device = kCuda}), made;
  cuda::Graph graph;
  graph.capture([&] {
    made = one_hot(labels, 3).to(float32) + arange(0.5, 2.6, 1, {.device = kCuda}) +
           eye(3, {.device = kCuda}).select(0, 1);
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
                   elsewhere = ones({3}, {.device = kSeveral ? kOther : kCuda});
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
      refused([&] { on_host.to(kCuda); }, "values are copied from the host");
      refused([&] { pinned.to(kCuda, true); }, "values are copied from the host");
      refused([&] { t.x.copy_(on_host); }, "values are copied from the host");
      refused([&] { randperm(5, {.device = kCuda}); }, "[randperm] an order is made on the host and copied");
      refused([&] { cuda::synchronize(kCuda); }, "nothing runs that could be waited for");
      refused([&] { empty_cache(); }, "memory cannot be given back");
      refused([&] { cuda::pin_memory(ones({12345})); }, "page-locked memory cannot be made");
      if (kSeveral) refused([&] { elsewhere + 1; }, "work for cuda:1 while a graph of cuda:0 is captured");
      if (kSeveral) refused([&] { t.x.to(kOther); }, "work for cuda:1");
      refused([&] { empty({std::int64_t{1} << 40}, {.device = kCuda}); }, "out of memory on cuda:0");
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
      for (const Device other : {Device("cpu"), kSeveral ? kOther : Device("cpu")}) {
        Tensor here = ones({2}, {.device = kCuda}).requires_grad_(),
               there = ones({2}, {.device = other}).requires_grad_();
        here.set_grad(ones({2}, {.device = kCuda}));
        there.set_grad(ones({2}, {.device = other}));
        optim::SGD of_both({here, there}, {.lr = 0.1});
        const std::uint32_t version = here.version();
        refused([&] { of_both.step(); }, other.is_cpu()
                                             ? "parameter 1 lies on cpu:0, and a graph of cuda:0 is being captured"
                                             : "parameter 1 lies on cuda:1, and a graph of cuda:0 is being captured");
        CHECK(equal(there.detach(), ones({2}, {.device = other})));
        CHECK(here.version() == version);
      }
      const std::vector<Device> devices{kCuda, kOther};
      if (kSeveral) refused([&] { run_on_devices(devices, [](int) {}); }, "work is divided among 2 devices");
      CHECK_ERROR(good.capture([] {}), "holds a capture already");
      CHECK_ERROR(t.graph.capture([&] { on_host + 1; }), "gave no work to cuda:0");
      good = cuda::Graph(kCuda);
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
  t.graph = cuda::Graph(kCuda);
}

}  // namespace
}  // namespace tandem
