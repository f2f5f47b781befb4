// The updates themselves: against plain loops for every combination of options, against numbers from PyTorch, and on
// the inputs that other systems got wrong.
#include <algorithm>
#include <memory>

#include <tandem/autograd/functions.h>
#include <tandem/optim/adam.h>
#include <tandem/optim/sgd.h>
#include <tandem/tensor/callable.h>
#include <tandem/tensor/random.h>
#include <tandem/tensor/threads.h>
#include <tandem/tests/optim/support.h>

using namespace tandem;
using namespace tandem::test;
using Vector = std::vector<double>;

namespace {

const Vector kStart{0.5, -1.25, 2.0, 0.1};

Vector naive_sgd(Vector p, const optim::SGDOptions& o, int steps) {
  Vector b(p.size());
  for (int t = 0; t < steps; ++t) {
    const Vector gradient = gradient_at(t);
    for (std::size_t i = 0; i < p.size(); ++i) {
      double g = gradient[i] + o.weight_decay * p[i];
      if (o.momentum != 0) {
        b[i] = t == 0 ? g : o.momentum * b[i] + (1 - o.dampening) * g;
        g = o.nesterov ? g + o.momentum * b[i] : b[i];
      }
      p[i] -= o.lr * g;
    }
  }
  return p;
}

Vector naive_adam(Vector p, const optim::AdamOptions& o, bool decoupled, int steps) {
  Vector m(p.size()), v(p.size()), largest(p.size());
  for (int t = 1; t <= steps; ++t) {
    const Vector gradient = gradient_at(t - 1);
    for (std::size_t i = 0; i < p.size(); ++i) {
      double g = gradient[i];
      if (decoupled)
        p[i] *= 1 - o.lr * o.weight_decay;
      else
        g += o.weight_decay * p[i];
      m[i] = o.betas[0] * m[i] + (1 - o.betas[0]) * g;
      v[i] = o.betas[1] * v[i] + (1 - o.betas[1]) * g * g;
      largest[i] = std::max(largest[i], v[i]);
      const double corrected = std::sqrt(o.amsgrad ? largest[i] : v[i]) / std::sqrt(1 - std::pow(o.betas[1], t));
      p[i] -= o.lr / (1 - std::pow(o.betas[0], t)) * m[i] / (corrected + o.eps);
    }
  }
  return p;
}

optim::AdamWOptions decoupled(const optim::AdamOptions& o) {
  return {.lr = o.lr, .betas = o.betas, .eps = o.eps, .weight_decay = o.weight_decay, .amsgrad = o.amsgrad};
}

/// Parameters after five steps, and the same in float32.
template <class Method, class Options>
void check_five_steps(const Options& options, const Vector& expected, double tolerance) {
  for (const DType dtype : {float64, float32}) {
    Tensor p = leaf(kStart, dtype);
    Method optimizer({p}, options);
    run_steps(optimizer, 0, 5);
    CHECK(p.dtype() == dtype);
    CHECK_CLOSE(p.detach().to(float64), tensor(expected), dtype == float64 ? tolerance : 1e-6);
  }
}

template <class Method>
Tensor long_run(int threads) {
  const int before = num_threads();
  set_num_threads(threads);
  manual_seed(3);
  Tensor p = randn({100'003}).requires_grad_();
  Method optimizer({p}, {.lr = 0.01, .weight_decay = 0.1});
  for (int t = 0; t < 3; ++t) {
    p.set_grad(randn({100'003}));
    optimizer.step();
  }
  set_num_threads(before);
  return p.detach();
}

}  // namespace

TEST_CASE("SGD follows its formula for every combination of options") {
  for (const double momentum : {0.0, 0.9})
    for (const double dampening : {0.0, 0.3})
      for (const double weight_decay : {0.0, 0.05})
        for (const bool nesterov : {false, true}) {
          if (nesterov && (momentum == 0 || dampening != 0)) continue;
          const optim::SGDOptions options{.lr = 0.1,
                                          .momentum = momentum,
                                          .dampening = dampening,
                                          .weight_decay = weight_decay,
                                          .nesterov = nesterov};
          CAPTURE(momentum);
          CAPTURE(dampening);
          CAPTURE(weight_decay);
          CAPTURE(nesterov);
          check_five_steps<optim::SGD>(options, naive_sgd(kStart, options, 5), 1e-14);
        }
}

TEST_CASE("Adam and AdamW follow their formulas for every combination of options") {
  for (const std::array<double, 2> betas : {std::array{0.9, 0.999}, std::array{0.0, 0.5}, std::array{0.8, 0.0}})
    for (const double eps : {1e-8, 1e-3})
      for (const double weight_decay : {0.0, 0.1})
        for (const bool amsgrad : {false, true}) {
          const optim::AdamOptions options{
              .lr = 0.05, .betas = betas, .eps = eps, .weight_decay = weight_decay, .amsgrad = amsgrad};
          CAPTURE(betas[0]);
          CAPTURE(eps);
          CAPTURE(weight_decay);
          CAPTURE(amsgrad);
          check_five_steps<optim::Adam>(options, naive_adam(kStart, options, false, 5), 1e-13);
          check_five_steps<optim::AdamW>(decoupled(options), naive_adam(kStart, options, true, 5), 1e-13);
        }
}

// Computed by PyTorch 1.13.1 in float64.
TEST_CASE("five steps agree with PyTorch") {
  using namespace optim;
  check_five_steps<SGD>(SGDOptions{.lr = 0.1},
                        {0.217213506596907, -1.3726417279385463, 2.2171734562749799, 0.33882901826236672}, 1e-13);
  check_five_steps<SGD>(SGDOptions{.lr = 0.1, .weight_decay = 0.05},
                        {0.2072139768977557, -1.3381342795698754, 2.1672039489464634, 0.33253565263647311}, 1e-13);
  check_five_steps<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.05},
                        {-0.003567395415600126, -1.7805790821401533, 2.0559528946538848, 0.77523966496717389}, 1e-13);
  check_five_steps<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.05, .nesterov = true},
                        {-0.42836903122968634, -1.8658062686314349, 2.3376516110708945, 1.0794872219452289}, 1e-13);
  check_five_steps<Adam>(AdamOptions{.lr = 0.1},
                         {0.16342620058834559, -1.6271200188598172, 2.0236138492067335, 0.54957150212183747}, 1e-13);
  check_five_steps<Adam>(
      AdamOptions{.lr = 0.05, .betas = {0.8, 0.9}, .eps = 1e-3, .weight_decay = 0.1, .amsgrad = true},
      {0.27579696319449803, -1.4079804158830391, 1.9754153714023759, 0.31539798605858177}, 1e-13);
  check_five_steps<AdamW>(AdamWOptions{.lr = 0.1},
                          {0.16141448742352263, -1.6199335285003824, 2.0140327733011851, 0.5480856974545697}, 1e-13);
  check_five_steps<AdamW>(
      AdamWOptions{.lr = 0.05, .betas = {0.8, 0.9}, .eps = 1e-3, .weight_decay = 0.1, .amsgrad = true},
      {0.31806643328850742, -1.3930074984959553, 1.9771798193962873, 0.31213151227590091}, 1e-13);
}

// ml-explore/mlx PR#473 (#440), pytorch PR#152833
TEST_CASE("weight decay acts without momentum, and dampening spares the first step") {
  Tensor p = leaf({1});
  optim::SGD plain({p}, {.lr = 0.1, .weight_decay = 0.1});
  set_gradient(p, {0});
  plain.step();
  CHECK(p.item<double>() == doctest::Approx(0.99).epsilon(1e-15));

  Tensor q = leaf({1});
  optim::SGD dampened({q}, {.lr = 0.1, .momentum = 0.9, .dampening = 0.5});
  set_gradient(q, {3});
  dampened.step();
  CHECK(entry(dampened.state_dict(), "0.momentum_buffer").item<double>() == 3);
  CHECK(q.item<double>() == doctest::Approx(0.7).epsilon(1e-15));
}

// mlx PR#1640, pytorch#22628, #2060, #41477
TEST_CASE("Adam corrects its means and adds eps after the correction") {
  for (const DType dtype : {float64, float32}) {
    Tensor p = leaf({0, 0}, dtype);
    optim::Adam optimizer({p}, {.lr = 1, .eps = 1e-8});
    set_gradient(p, {1, 1e-8});
    optimizer.step();
    CHECK_CLOSE(p.detach().to(float64), tensor(Vector{-1.0, -0.5}), 1e-6);
  }
}

// pytorch#83769, KellerJordan/Muon#54
TEST_CASE("an undefined gradient is skipped and gets no state, a zero gradient moves the parameter") {
  const auto check_method = [](FunctionRef<std::unique_ptr<optim::Optimizer>(std::vector<Tensor>)> make) {
    Tensor used = leaf({1, 2}), unused = leaf({1, 2}), zero = leaf({1, 2});
    const std::unique_ptr<optim::Optimizer> optimizer = make({used, unused, zero});
    const std::uint32_t version = unused.version();
    for (int t = 0; t < 3; ++t) {
      optimizer->zero_grad();
      sum(used * used).backward();
      set_gradient(zero, {0, 0});
      optimizer->step();
    }
    CHECK(unused.to_vector<double>() == Vector{1, 2});
    CHECK(unused.version() == version);
    for (const Tensor& moved : {used, zero}) {
      CHECK(moved.to_vector<double>()[0] < 1);
      CHECK(moved.to_vector<double>()[1] < 2);
    }
    const NamedTensors state = optimizer->state_dict();
    for (const auto& item : state) CHECK(!item.first.starts_with("1."));
    CHECK(entry(state, "2.step").item<int64_t>() == 3);
  };
  check_method([](std::vector<Tensor> p) {
    return std::make_unique<optim::SGD>(p, optim::SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1});
  });
  check_method([](std::vector<Tensor> p) {
    return std::make_unique<optim::Adam>(p, optim::AdamOptions{.lr = 0.1, .weight_decay = 0.1});
  });
  check_method([](std::vector<Tensor> p) { return std::make_unique<optim::AdamW>(p, optim::AdamWOptions{.lr = 0.1}); });
}

TEST_CASE("a parameter that gets its first gradient late starts its own count") {
  Tensor early = leaf({0}), late = leaf({0});
  optim::Adam optimizer({early, late}, {.lr = 1});
  for (int t = 0; t < 4; ++t) {
    set_gradient(early, {1});
    if (t == 3) set_gradient(late, {1});
    optimizer.step();
  }
  CHECK(late.item<double>() == doctest::Approx(-1));
  CHECK(entry(optimizer.state_dict(), "0.step").item<int64_t>() == 4);
  CHECK(entry(optimizer.state_dict(), "1.step").item<int64_t>() == 1);
}

TEST_CASE("a step changes the parameter in place, raises its version and leaves the gradient alone") {
  Tensor p = leaf({1, 2});
  const double* data = std::as_const(p).data<double>();
  optim::SGD optimizer({p}, {.lr = 0.5, .momentum = 0.9, .weight_decay = 1});
  const Tensor y = p * p;
  set_gradient(p, {4, 6});
  const Tensor g = p.grad();
  const std::uint32_t version = p.version(), gradient_version = g.version();
  for (int t = 0; t < 3; ++t) optimizer.step();
  CHECK(std::as_const(p).data<double>() == data);
  CHECK(p.version() == version + 3);
  CHECK(p.is_leaf());
  CHECK(p.requires_grad());
  CHECK(g.to_vector<double>() == Vector{4, 6});
  CHECK(g.version() == gradient_version);
  CHECK(entry(optimizer.state_dict(), "0.momentum_buffer").requires_grad() == false);
  CHECK_ERROR(sum(y).backward(), "mul", "changed");
}

TEST_CASE("zero_grad makes gradients undefined, also those of frozen parameters") {
  Tensor a = leaf({1}), b = leaf({1}), never = leaf({1}), plain = tensor(Vector{1});
  optim::SGD optimizer({a, b, never, plain});
  set_gradient(a, {1});
  set_gradient(b, {1});
  b.requires_grad_(false);
  optimizer.zero_grad();
  for (const Tensor& p : optimizer.parameters()) CHECK(!p.grad().defined());
  optimizer.step();
  CHECK(optimizer.state_dict().size() == 6);  // of the group alone
}

TEST_CASE("a gradient that is not contiguous is read in its order") {
  Tensor p = zeros({2, 3}, {.dtype = float64}).requires_grad_();
  optim::SGD optimizer({p}, {.lr = 1});
  p.set_grad(arange(6.0, {.dtype = float64}).view({3, 2}).t());
  optimizer.step();
  CHECK(p.to_vector<double>() == Vector{0, -2, -4, -1, -3, -5});
  p.set_grad(ones({1}, {.dtype = float64}).expand({2, 3}));
  optimizer.step();
  CHECK(p.to_vector<double>() == Vector{-1, -3, -5, -2, -4, -6});
}

TEST_CASE("parameters without elements and single numbers") {
  Tensor none = zeros({0, 3}).requires_grad_(), one = full({}, 1.0).requires_grad_();
  optim::Adam optimizer({none, one}, {.lr = 0.5, .amsgrad = true});
  none.set_grad(zeros({0, 3}));
  one.set_grad(full({}, 2.0));
  optimizer.step();
  CHECK(none.numel() == 0);
  CHECK(one.item<double>() == doctest::Approx(0.5));
}

TEST_CASE("the bits do not depend on the number of threads") {
  CHECK(equal(long_run<optim::SGD>(1), long_run<optim::SGD>(2)));
  CHECK(equal(long_run<optim::Adam>(1), long_run<optim::Adam>(2)));
  CHECK(equal(long_run<optim::AdamW>(1), long_run<optim::AdamW>(3)));
}

TEST_CASE("state lives on the device of its parameter") {
  set_cpu_device_count(2);
  Tensor here = leaf(kStart), there = leaf(kStart, float64, "cpu:1");
  optim::Adam optimizer({here, there}, {.lr = 0.1, .amsgrad = true});
  run_steps(optimizer, 0, 5);
  CHECK(there.device() == Device("cpu:1"));
  CHECK(there.to_vector<double>() == here.to_vector<double>());
  for (const char* name : {"1.exp_avg", "1.exp_avg_sq", "1.max_exp_avg_sq"})
    CHECK(entry(optimizer.state_dict(), name).device() == Device("cpu:1"));
  set_cpu_device_count(1);
}

TEST_CASE("state follows a parameter that is moved between steps") {
  set_cpu_device_count(2);
  Tensor stays = leaf(kStart), moves = leaf(kStart);
  optim::Adam optimizer({stays, moves}, {.lr = 0.1});
  run_steps(optimizer, 0, 2);
  moves.set_data(moves.detach().to("cpu:1"));
  CHECK_ERROR(optimizer.step(), "[Adam]", "parameter 1", "cpu:1", "zero_grad()");
  CHECK(entry(optimizer.state_dict(), "0.step").item<int64_t>() == 2);
  optimizer.zero_grad();
  run_steps(optimizer, 2, 5);
  CHECK(moves.device() == Device("cpu:1"));
  CHECK(moves.to_vector<double>() == stays.to_vector<double>());
  set_cpu_device_count(1);
}

TEST_CASE("a parameter that changed its shape or layout is an error, and nothing moves") {
  Tensor first = leaf({1}), p = leaf(kStart);
  optim::SGD optimizer({first, p}, {.momentum = 0.9});
  run_steps(optimizer, 0, 1);
  const double before = first.item<double>();
  optimizer.zero_grad();
  p.set_data(zeros({2}, {.dtype = float64}));
  set_gradient(first, {1});
  set_gradient(p, {1, 1});
  CHECK_ERROR(optimizer.step(), "[SGD]", "parameter 1", "{2}", "{4}", "new optimizer");
  p.set_data(zeros({4, 2}, {.dtype = float64}).select(1, 0));
  set_gradient(p, {1, 1, 1, 1});
  CHECK_ERROR(optimizer.step(), "[SGD]", "parameter 1", "contiguous()");
  CHECK(first.item<double>() == before);
}
