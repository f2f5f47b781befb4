// Losses, gradients and weights over 50 steps on Fashion-MNIST against PyTorch's, from a start that both compute by
// formula, on one device and in every parallel mode. trajectories.json was made with PyTorch 1.13.1 in float32 on one
// thread. usage: trajectories_program one | dp N | ddp N BACKEND [EVERY]; for the backend mpi it is one of N ranks,
// which mpirun starts; with EVERY = n only every n-th optimizer. Ends with 1 on a fault.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include <tandem/tandem.h>

using namespace tandem;

namespace {

// Parameter number l, flat index k: sin(0.7 k + l) / sqrt(fan) * cos(0.013 k (l + 1)), in double, rounded once.
void set_start_weights(nn::Module& model) {
  const NoGradGuard no_grad;
  int l = 0;
  for (Tensor& p : model.parameters()) {
    const double fan = p.dim() == 2 ? static_cast<double>(p.size(1)) : 512.0;
    float* data = p.data<float>();
    for (int64_t k = 0; k < p.numel(); ++k) {
      const double x = static_cast<double>(k);
      data[k] = static_cast<float>(std::sin(0.7 * x + l) / std::sqrt(fan) * std::cos(0.013 * x * (l + 1)));
    }
    ++l;
  }
}

std::unique_ptr<optim::Optimizer> make_optimizer(const std::string& name, const std::vector<Tensor>& p) {
  using namespace optim;
  if (name == "sgd lr=1e-3") return std::make_unique<SGD>(p, SGDOptions{.lr = 1e-3});
  if (name == "sgd lr=0.1") return std::make_unique<SGD>(p, SGDOptions{.lr = 0.1});
  if (name == "sgd lr=0.05 momentum=0.9") return std::make_unique<SGD>(p, SGDOptions{.lr = 0.05, .momentum = 0.9});
  if (name == "sgd lr=0.05 momentum=0.9 nesterov weight_decay=1e-4")
    return std::make_unique<SGD>(p, SGDOptions{.lr = 0.05, .momentum = 0.9, .weight_decay = 1e-4, .nesterov = true});
  if (name == "adam lr=1e-3") return std::make_unique<Adam>(p, AdamOptions{.lr = 1e-3});
  if (name == "adam lr=1e-3 weight_decay=1e-2")
    return std::make_unique<Adam>(p, AdamOptions{.lr = 1e-3, .weight_decay = 1e-2});
  if (name == "adam lr=1e-3 amsgrad") return std::make_unique<Adam>(p, AdamOptions{.lr = 1e-3, .amsgrad = true});
  if (name == "adamw lr=1e-3 weight_decay=1e-2")
    return std::make_unique<AdamW>(p, AdamWOptions{.lr = 1e-3, .weight_decay = 1e-2});
  fail("trajectories", "the file has a run '{}' that this test does not know", name);
}

double length(const Tensor& t) { return norm(t.detach().to(float64)).item<double>(); }

std::vector<int64_t> rows(int64_t first, int64_t count) { return arange(first, first + count).to_vector<int64_t>(); }

void require_close(const std::string& what, double got, double expected, double relative) {
  check(std::abs(got - expected) <= relative * std::abs(expected), "trajectories", "{} is {}, but PyTorch's is {}",
        what, got, expected);
}

struct Mode {
  std::string name;  // "one", "dp", "ddp"
  int devices = 1;
  std::size_t every = 1;
};

class Follower {
 public:
  Follower(const nlohmann::json& run, const Mode& mode)
      : run_(run),
        net_(std::make_shared<nn::SequentialImpl>(nn::Flatten(), nn::Linear(784, 512), nn::ReLU(), nn::Linear(512, 512),
                                                  nn::ReLU(), nn::Linear(512, 10))) {
    set_start_weights(*net_);
    optimizer_ = make_optimizer(run["name"].get<std::string>(), net_->parameters());
    if (mode.name == "dp") dp_.emplace(net_);
    if (mode.name == "ddp") ddp_.emplace(net_);
  }

  void follow(const data::FashionMNIST& train_set) {
    const auto batch_size = run_["batch_size"].get<int64_t>();
    const std::vector<Tensor> parameters = net_->parameters();
    for (int64_t i = 0; i < run_["steps"].get<int64_t>(); ++i) {
      const auto [x, y] = train_set.get_batch(rows(i * batch_size, batch_size));
      const Tensor loss = compute_loss(x, y);
      Tensor value = loss.detach().to(float64);
      if (ddp_) parallel::all_reduce(value, {.op = parallel::ReduceOp::avg});
      // Sums differ in order, and Adam magnifies that.
      require_close(fmt::format("loss {}", i), value.item<double>(),
                    run_["losses"][static_cast<std::size_t>(i)].get<double>(), i < 10 ? 1e-4 : 5e-3);
      loss.backward();
      for (std::size_t p = 0; i == 0 && p < 6; ++p)
        require_close(fmt::format("gradient {}", p), length(parameters[p].grad()),
                      run_["first_grad_norms"][p].get<double>(), 1e-5);
      optimizer_->step();
      optimizer_->zero_grad();
    }
    for (std::size_t p = 0; p < 6; ++p)
      require_close(fmt::format("parameter {}", p), length(parameters[p]), run_["final_param_norms"][p].get<double>(),
                    5e-3);
  }

  void evaluate(const Tensor& x, const Tensor& y) {
    const NoGradGuard no_grad;
    const Tensor logits = dp_ ? (*dp_)(x) : ddp_ ? (*ddp_)(x) : (*net_)(x);
    const auto correct = sum(argmax(logits, 1) == y).item<int64_t>(),
               expected = run_["test1000_correct"].get<int64_t>();
    check(std::abs(correct - expected) <= 8, "trajectories", "{} of 1000 images are right, but {} with PyTorch",
          correct, expected);
    require_close("test loss", loss_fn_(logits, y).item<double>(), run_["test1000_loss"].get<double>(), 5e-3);
  }

 private:
  Tensor compute_loss(const Tensor& x, const Tensor& y) {
    if (dp_) return dp_->loss(loss_fn_, x, y);
    if (!ddp_) return loss_fn_((*net_)(x), y);
    const int64_t rank = parallel::rank(), ranks = parallel::world_size();
    const int64_t begin = x.size(0) * rank / ranks, end = x.size(0) * (rank + 1) / ranks;
    return ddp_->loss(loss_fn_, x.slice(0, begin, end), y.slice(0, begin, end));
  }

  const nlohmann::json& run_;
  std::shared_ptr<nn::SequentialImpl> net_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::optional<parallel::DataParallel> dp_;
  std::optional<parallel::DistributedDataParallel> ddp_;
  nn::CrossEntropyLoss loss_fn_;
};

void follow_all(const Mode& mode) {
  std::ifstream file(TRAJECTORIES);
  check(file.good(), "trajectories", "{} cannot be read", TRAJECTORIES);
  const auto runs = nlohmann::json::parse(file);
  check(runs.size() == 8, "trajectories", "there are {} runs in the file; 8 were expected", runs.size());
  const data::FashionMNIST train_set({.train = true}), test_set({.train = false});
  const auto [test_x, test_y] = test_set.get_batch(rows(0, 1000));
  for (std::size_t i = mode.every / 2; i < runs.size(); i += mode.every) {
    const nlohmann::json& run = runs[i];
    try {
      Follower follower(run, mode);
      follower.follow(train_set);
      follower.evaluate(test_x, test_y);
    } catch (const Error& e) {
      fail("trajectories", "{}: {}", run["name"].get<std::string>(), e.what());
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Mode mode{argc > 1 ? argv[1] : "one", argc > 2 ? std::atoi(argv[2]) : 1,
                  argc > 4 ? static_cast<std::size_t>(std::max(std::atoi(argv[4]), 1)) : 1};
  const std::string backend = argc > 3 ? argv[3] : "";
  auto as_rank = [&](int, int) {
    parallel::init_process_group({.backend = backend});
    set_num_threads(1);
    follow_all(mode);
    parallel::destroy_process_group();
  };
  try {
    if (mode.name == "ddp" && backend == "thread") {
      parallel::spawn_threads(as_rank, {.nthreads = mode.devices});
      return 0;
    }
    if (mode.name == "ddp" && backend == "mpi") {
      as_rank(0, 0);
      return 0;
    }
    if (mode.name == "ddp") return parallel::spawn(as_rank, {.nprocs = mode.devices});
    if (mode.name == "dp") set_cpu_device_count(mode.devices);
    follow_all(mode);
    return 0;
  } catch (const Error& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
