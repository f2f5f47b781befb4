// Graphs and gradients: with any division of a step between the graph and the program, a replay leaves the gradients
// that the ordinary function would leave, or is refused.
#include <tandem/tests/cuda/cuda_device.h>
#include <tandem/tests/support/test.h>

#include <cmath>
#include <limits>

#include <tandem/autograd/grad_mode.h>
#include <tandem/nn/layers.h>
#include <tandem/nn/loss.h>
#include <tandem/nn/sequential.h>
#include <tandem/nn/utils.h>
#include <tandem/optim/adam.h>
#include <tandem/tensor/cuda.h>
#include <tandem/tensor/cuda_graph.h>
#include <tandem/tensor/random.h>

namespace tandem {
namespace {

using test::kCuda;

struct DividedTraining {
  DividedTraining() {
    model->to(kCuda);
    optimizer = std::make_unique<optim::Adam>(model->parameters(), optim::AdamOptions{.lr = 0.02});
  }
  void next_batch() { x.copy_(randn({6, 8})); }
  void zero() { optimizer->zero_grad(); }
  void backward() { criterion(model(x), y).backward(); }
  void step() { optimizer->step(); }
  void whole() {
    zero();
    backward();
    step();
  }
  std::vector<float> values() const {
    std::vector<float> all;
    for (const Tensor& p : model->parameters())
      for (const Tensor& t : {p, p.grad()}) {
        if (!t.defined()) continue;
        for (const float value : t.to_vector<float>()) all.push_back(value);
      }
    return all;
  }

  nn::Sequential model{nn::Linear(8, 16), nn::ReLU(), nn::Linear(16, 5)};
  std::unique_ptr<optim::Optimizer> optimizer;
  nn::CrossEntropyLoss criterion;
  Tensor x = zeros({6, 8}, {.device = kCuda}), y = zeros({6}, {.dtype = int64, .device = kCuda}), norm;
  cuda::Graph graph{kCuda};
};

// A step: what is before, in and after the graph.
struct Division {
  const char* name;
  void (*before)(DividedTraining&);
  void (*captured)(DividedTraining&);
  void (*after)(DividedTraining&);
};

constexpr auto kNothing = [](DividedTraining&) {};
constexpr auto kZeroInPlace = [](DividedTraining& t) {
  for (const Tensor& p : t.model->parameters()) p.grad().zero_();
};

const Division kDivisions[] = {
    {"gradients are clipped", kNothing,
     [](DividedTraining& t) {
       t.zero();
       t.backward();
       const std::vector<Tensor> parameters = t.model->parameters();
       std::vector<Tensor> gradients;
       for (const Tensor& p : parameters) gradients.push_back(p.grad());
       t.norm = nn::utils::get_total_norm(gradients);
       nn::utils::clip_grads_with_norm_(parameters, 0.5, t.norm);
       t.step();
     },
     [](DividedTraining& t) {
       const double norm = t.norm.item<double>();
       CHECK(norm > 0.5);
     }},
    {"all in the graph", kNothing, [](DividedTraining& t) { t.whole(); }, kNothing},
    {"zero_grad at the end", kNothing,
     [](DividedTraining& t) {
       t.backward();
       t.step();
       t.zero();
     },
     kNothing},
    {"zero_grad outside", [](DividedTraining& t) { t.zero(); },
     [](DividedTraining& t) {
       t.backward();
       t.step();
     },
     kNothing},
    {"step outside", kNothing,
     [](DividedTraining& t) {
       t.zero();
       t.backward();
     },
     [](DividedTraining& t) { t.step(); }},
    {"step and zero_grad outside", [](DividedTraining& t) { t.zero(); }, [](DividedTraining& t) { t.backward(); },
     [](DividedTraining& t) { t.step(); }},
    {"added to gradients that stay", kZeroInPlace,
     [](DividedTraining& t) {
       t.backward();
       t.backward();
     },
     [](DividedTraining& t) { t.step(); }},
    {"the step alone",
     [](DividedTraining& t) {
       kZeroInPlace(t);
       t.backward();
     },
     [](DividedTraining& t) { t.step(); }, kNothing},
};

TEST_CASE("cuda: a step divided between a graph and the program") {
  for (const Division& division : kDivisions) {
    const std::string name = division.name;
    CAPTURE(name);
    const auto run = [&](bool with_graph) {
      manual_seed(5);
      DividedTraining t;
      const auto step = [&](bool replay) {
        division.before(t);
        replay ? t.graph.replay() : division.captured(t);
        division.after(t);
      };
      t.next_batch();
      t.backward();
      for (int i = 0; i < 3; ++i) step(false);
      division.before(t);
      if (with_graph) {
        const std::vector<float> seen = t.values();
        t.graph.capture([&] { division.captured(t); });
        const std::vector<float> now = t.values();  // zero_grad in the function has dropped gradients
        CHECK((now == seen || now.size() < seen.size()));
      }
      std::vector<std::vector<float>> found;
      for (int i = 0; i < 5; ++i) {
        t.next_batch();
        step(with_graph && i != 2);  // an ordinary step between replays
        found.push_back(t.values());
      }
      return found;
    };
    CHECK(run(true) == run(false));
  }
}

TEST_CASE("cuda: replays are refused where gradients are not as they were at the capture") {
  DividedTraining t;
  t.next_batch();
  t.whole();
  const auto refused = [&](const char* text) {
    const std::vector<float> values = t.values();
    const std::vector<std::uint64_t> positions = random_state().positions;
    CHECK_ERROR(t.graph.replay(), "[Graph]", text, "zero_grad() at the beginning of the function");
    CHECK(t.values() == values);
    CHECK(random_state().positions == positions);
  };
  SUBCASE("zero_grad outside, but not before the capture") {
    t.graph.capture([&] {
      t.backward();
      t.step();
    });
    t.zero();
    refused("is not the one that it had when the graph was captured");
  }
  SUBCASE("no zero_grad between replays") {
    t.zero();
    t.graph.capture([&] { t.backward(); });
    t.graph.replay();
    refused("has a gradient, and had none when the graph was captured");
    t.zero();
    t.graph.replay();
    t.whole();
    refused("has a gradient, and had none when the graph was captured");
  }
  SUBCASE("a step of gradients from outside") {
    t.graph.capture([&] { t.step(); });
    t.graph.replay();
    t.zero();
    t.backward();
    refused("is not the one that it had when the graph was captured");
  }
}

TEST_CASE("cuda: a capture that fails leaves the gradients of before") {
  DividedTraining t;
  t.next_batch();
  t.whole();
  const std::vector<float> values = t.values();
  const Tensor gradient = t.model->parameters()[0].grad();
  CHECK_ERROR(t.graph.capture([&] {
    t.backward();
    throw Error("of the body's own");
  }),
              "own");
  CHECK(t.values() == values);
  CHECK(t.model->parameters()[0].grad().identity() == gradient.identity());
  CHECK_ERROR(t.graph.capture([&] {
    t.whole();
    throw Error("of the body's own");
  }),
              "own");
  CHECK_FALSE(t.model->parameters()[0].grad().defined());
}

TEST_CASE("cuda: leaves that the function makes have no gradient to begin with") {
  const Tensor x = ones({4}, {.device = kCuda});
  Tensor fresh, detached;
  cuda::Graph graph;
  graph.capture([&] {
    fresh = (x * 1).requires_grad_();
    detached = x.detach().requires_grad_();
    sum(fresh * detached * x).backward();
  });
  for (int i = 0; i < 2; ++i) {
    graph.replay();
    CHECK(fresh.grad().to_vector<float>() == std::vector<float>(4, 1));
    CHECK(detached.grad().to_vector<float>() == std::vector<float>(4, 1));
  }
}

TEST_CASE("cuda: a graph without a step, too, refuses to use the memory that a model had before it was moved") {
  DividedTraining t;
  Tensor out;
  const auto capture = [&](auto body) {
    t.graph = cuda::Graph(kCuda);
    t.graph.capture([&] {
      const NoGradGuard no_grad;
      out = body();
    });
    t.graph.replay();
    t.model->to("cpu");
    t.model->to(kCuda);
    CHECK_ERROR(t.graph.replay(), "has other memory, or another shape or strides");
  };
  capture([&] { return t.model(t.x); });
  capture([&] { return matmul(t.x, t.model->parameters()[0].t()); });
  capture([&] { return t.model->parameters()[0].detach() * 2; });
  // To another place in the same memory.
  const Tensor both = ones({8}, {.device = kCuda});
  Tensor x = both.narrow(0, 0, 4).detach();
  cuda::Graph graph(kCuda);
  graph.capture([&] { out = x * 2; });
  graph.replay();
  x.set_data(both.narrow(0, 4, 4));
  CHECK_ERROR(graph.replay(), "has other memory, or another shape or strides");
  // To another order in the same place.
  const Tensor square = rand({2, 2}, {.device = kCuda});
  x = square.detach();
  graph = cuda::Graph(kCuda);
  graph.capture([&] { out = x * 2; });
  graph.replay();
  x.set_data(square.t());
  CHECK_ERROR(graph.replay(), "has other memory, or another shape or strides");
}

TEST_CASE("cuda: gradients on GPUs are clipped as on the CPU, in one type or several, on one device or several") {
  const Device other = cuda::device_count() > 1 ? Device(DeviceType::cuda, 1) : kCuda;
  const double kInfinity = std::numeric_limits<double>::infinity();
  for (const double middle : {3.0, 0.1, kInfinity, std::nan("")}) {
    CAPTURE(middle);
    const auto clipped = [&](bool on_gpu) {
      std::vector<Tensor> leaves, gradients;
      for (const auto& [gradient, device] : {std::pair(tensor({1.0, middle, 2.0}, {.dtype = float32}), kCuda),
                                             std::pair(tensor({0.1, -0.5}, {.dtype = float64}), other)}) {
        const Tensor moved = gradient.to(on_gpu ? device : Device());
        leaves.push_back(zeros_like(moved).requires_grad_());
        leaves.back().set_grad(moved);
        gradients.push_back(moved);
      }
      const Tensor norm = nn::utils::get_total_norm(gradients);
      nn::utils::clip_grads_with_norm_(leaves, 2.5, norm);
      CHECK(norm.device() == (on_gpu ? kCuda : Device()));
      CHECK(norm.dtype() == float64);
      const auto second = tensor(nn::utils::clip_grad_norm_(leaves, 1.5), {.dtype = float64});
      return std::vector{norm.to("cpu"), second, leaves[0].grad().to("cpu"), leaves[1].grad().to("cpu")};
    };
    const std::vector<Tensor> expected = clipped(false), found = clipped(true);
    for (std::size_t i = 0; i < 4; ++i) CHECK(found[i].str() == expected[i].str());
  }
}

}  // namespace
}  // namespace tandem
