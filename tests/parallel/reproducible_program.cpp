// Training with reproducible_shards has the same bits on 1, 2 and 4 devices and ranks, in every mode, also after a
// resume in another one. Ends with 1 on a fault.
// usage: reproducible_program BACKEND,...; for mpi it is one rank, which mpirun starts
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include <tandem/tests/parallel/ddp_cases.h>

using namespace tandem;

namespace {

constexpr int kShards = 4, kSteps = 50;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::int64_t kInputs = 48, kWidth = 32, kClasses = 10;
#else
// Sizes at which matrix products have other bits on two threads than on one.
constexpr std::int64_t kInputs = 784, kWidth = 256, kClasses = 10;
#endif

// A tied layer, Dropout, a buffer that training changes, and a parameter that some parts do not reach.
struct Net : nn::Module {
  Net() {
    first = register_module("first", nn::Linear(kInputs, kWidth));
    tied = register_module("tied", nn::Linear(kWidth, kWidth));
    dropout = register_module("dropout", nn::Dropout(0.3));
    last = register_module("last", nn::Linear(kWidth, kClasses));
    bias = register_parameter("bias", zeros({kClasses}));
    average = register_buffer("average", zeros({kWidth}));
  }
  Tensor forward(const Tensor& x) override {
    Tensor y = dropout(relu(first(x)));
    if (is_training() && x.size(0) > 0) {
      const NoGradGuard no_grad;
      average.mul_(0.9).add_(mean(y.detach(), 0) * 0.1);
    }
    y = tied(y) + average.detach() * 0.01;
    y = last(relu(tied(y)));
    return x.size(0) > 0 && x[0][0].item<float>() > 0 ? y + bias : y;
  }
  nn::Linear first{nullptr}, tied{nullptr}, last{nullptr};
  nn::Dropout dropout{nullptr};
  Tensor bias;
  nn::Buffer average;
};

struct Mode {
  int devices = 0;  // of a DataParallel
  test::Group group = nullptr;
};

// One run. The second case has an optimizer that is divided among the ranks and is made after wrapping, a second
// wrapper with other parts, and now and then two losses and two backwards in a step.
class Training {
 public:
  Training(const Mode& mode, int which) : mode_(mode), case_(which) {
    if (mode.group) mode.group->barrier().wait();  // where ranks are threads, the seed is one
    manual_seed(3);
    if (mode.group) mode.group->barrier().wait();
    net_ = std::make_shared<Net>();
    test::fill(*net_);
    for (const int shards : which == 0 ? std::vector{kShards} : std::vector{kShards, 2 * kShards}) wrap(shards);
    const auto adam_w = [](std::vector<Tensor> parameters) -> std::unique_ptr<optim::Optimizer> {
      return std::make_unique<optim::AdamW>(std::move(parameters), optim::AdamWOptions{.lr = 0.003});
    };
    if (which == 0)
      optimizer_ = std::make_unique<optim::SGD>(net_->parameters(), optim::SGDOptions{.lr = 0.05, .momentum = 0.9});
    else if (mode.group)
      zero_ = std::make_unique<parallel::ZeroRedundancyOptimizer>(net_->parameters(), adam_w, mode.group);
    else
      optimizer_ = adam_w(net_->parameters());
  }

  void steps(int count) {
    for (; count > 0; --count, ++progress_.step) step(static_cast<int>(progress_.step));
  }
  void save(const std::string& path) {
    if (zero_)
      parallel::save_checkpoint(path, {net_, zero_, progress_}, mode_.group);
    else if (!mode_.group || mode_.group->rank() == 0)  // which has all there is to save
      tandem::save(path, {net_, optimizer_, progress_});
    if (mode_.group) mode_.group->barrier().wait();
  }
  void load(const std::string& path) {
    if (zero_)
      parallel::load_checkpoint(path, {net_, zero_, progress_}, {}, mode_.group);
    else if (mode_.group)
      parallel::load_checkpoint(path, {net_, optimizer_, progress_}, {}, mode_.group);
    else
      tandem::load(path, {net_, optimizer_, progress_});
  }
  // Of a single process or rank 0: the other ranks have theirs until the next forward.
  std::string buffers() const {
    std::uint64_t h = 0;
    add(h, net_->average);
    return fmt::format("buffers {:016x}\n", h);
  }
  // The losses since the last call, and what optimizers change.
  std::string digest() {
    std::uint64_t losses = 0, state = 0;
    for (const double loss : std::exchange(losses_, {})) add(losses, tensor(loss));
    for (const Tensor& p : net_->parameters()) add(state, p);
    for (const auto& entry : zero_ ? zero_->state_dict() : optimizer_->state_dict()) add(state, entry.second);
    return fmt::format("losses {:016x} state {:016x}\n", losses, state);
  }

 private:
  void wrap(int shards) {
    if (mode_.group) {
      ddp_.push_back(std::make_unique<parallel::DistributedDataParallel>(
          net_, parallel::DistributedDataParallelOptions{
                    .process_group = mode_.group, .find_unused_parameters = true, .reproducible_shards = shards}));
      return;
    }
    std::vector<Device> devices;
    for (int i = 0; i < mode_.devices; ++i) devices.emplace_back(DeviceType::cpu, i);
    dp_.push_back(std::make_unique<parallel::DataParallel>(
        net_, parallel::DataParallelOptions{.device_ids = devices, .reproducible_shards = shards}));
  }
  template <class Function>
  Tensor with_wrapper(int step, const Function& function) {
    const auto at = static_cast<std::size_t>(step) % std::max(ddp_.size(), dp_.size());
    return mode_.group ? function(*ddp_[at]) : function(*dp_[at]);
  }

  static void add(std::uint64_t& h, const Tensor& t) {
    for (const auto value : t.detach().to(float64).to_vector<double>())
      h = (h ^ std::bit_cast<std::uint64_t>(value)) * 0x9E3779B97F4A7C15 ^ (h >> 29);
  }

  Tensor loss(int step) {
    const std::int64_t sizes[] = {64, 37, 3, 29, 1};  // uneven parts, and fewer rows than parts
    const std::int64_t rows = sizes[step % 5];
    const Tensor x = data_.narrow(0, step % 7, rows);
    const Tensor y = test::labels(rows, kClasses, step);
    Tensor value;
    if (step % 3 == 0) {
      value = of_function(step, x, y);
    } else {
      const nn::CrossEntropyLoss criterion({.weight = test::wave({kClasses}, 1, float32) + 1.5, .ignore_index = 4});
      value = with_wrapper(step, [&](auto& model) { return model.loss(criterion, x, y); });
    }
    losses_.push_back(value.item<double>());
    return value;
  }
  Tensor of_function(int step, const Tensor& x, const Tensor& y) {
    const auto function = [](const Tensor& output, const Tensor& target) {
      return mean(pow(output - target.unsqueeze(1).to(float32) * 0.1, 2));
    };
    return with_wrapper(step, [&](auto& model) { return model.loss(function, Reduction::mean, x, y); });
  }

  void step(int step) {
    if (case_ == 0 || step % 5 != 0) {
      loss(step).backward();
    } else {
      (loss(step) * 0.5 + loss(step + 1)).backward();
      loss(step + 2).backward();
    }
    nn::utils::clip_grad_norm_(net_->parameters(), 0.5);
    if (zero_) {
      zero_->step();
      zero_->zero_grad();
    } else {
      optimizer_->step();
      optimizer_->zero_grad();
    }
    (void)rand({static_cast<std::int64_t>(step % 3)});  // what the program draws itself does not shift the parts'
  }

  Mode mode_;
  int case_;
  const Tensor data_ = test::wave({71, kInputs}, 1, float32);
  std::shared_ptr<Net> net_;
  std::vector<std::unique_ptr<parallel::DataParallel>> dp_;
  std::vector<std::unique_ptr<parallel::DistributedDataParallel>> ddp_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<parallel::ZeroRedundancyOptimizer> zero_;  // in its place
  Progress progress_;
  std::vector<double> losses_;
};

std::string file_of(const std::string& folder, const std::string& name, int which) {
  return fmt::format("{}/{}.{}", folder, name, which);
}
std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Runs both cases to the end, and then again from the middle, where another mode has saved it. What it finds is written
// to a file by rank 0, which all ranks agree with.
void run_mode(const Mode& mode, const std::string& folder, const std::string& name, const std::string& saved_by) {
  for (const int which : {0, 1}) {
    Training whole(mode, which);
    whole.steps(kSteps / 2);
    std::string found = whole.digest();
    whole.save(file_of(folder, name, which));
    whole.steps(kSteps / 2);
    const std::string end = whole.digest();
    found += end;
    Training resumed(mode, which);
    resumed.load(file_of(folder, saved_by, which));
    resumed.steps(kSteps / 2);
    test::require(resumed.digest() == end, fmt::format("{}, case {}, resumed from {}", name, which, saved_by));
    const std::string path = file_of(folder, name + ".txt", which);
    if (!mode.group || mode.group->rank() == 0) std::ofstream(path) << found << whole.buffers();
    if (!mode.group) continue;
    mode.group->barrier().wait();
    test::require(read(path).starts_with(found), fmt::format("{} has the same bits on all ranks", name));
    mode.group->barrier().wait();
  }
}

void different_seeds() {
  parallel::DistributedDataParallel ddp(test::make_mlp(), {.reproducible_shards = 2});
  manual_seed(static_cast<std::uint64_t>(5 + parallel::rank()));
  test::require_error({"every rank has the same seed, but rank 0 has 5 and rank 1 has 6; call manual_seed"}, [&] {
    ddp.loss(nn::CrossEntropyLoss(), test::wave({4, 6}, 1), test::labels(4, 4, 1));
  });
}

void run_ranks(const std::string& backend, const std::string& folder, const std::string& name,
               const std::string& saved_by) {
  parallel::init_process_group({.backend = backend});
  if (name == "shm2") different_seeds();
  run_mode({.group = parallel::default_group()}, folder, name, saved_by);
  parallel::destroy_process_group();
}

// Every process has the run of one device beside its own.
void compare_with_one_device(const std::string& backend) {
  const std::string folder = std::filesystem::temp_directory_path();
  std::string one, ranks;
  for (const int which : {0, 1}) {
    Training alone({.devices = 1}, which);
    alone.steps(kSteps / 5);
    one += alone.digest();
  }
  parallel::init_process_group({.backend = backend});
  for (const int which : {0, 1}) {
    Training ours({.group = parallel::default_group()}, which);
    ours.steps(kSteps / 5);
    ranks += ours.digest();
  }
  test::require(one == ranks, "one device and the ranks have the same bits");
  parallel::destroy_process_group();
}

int all_modes(const std::string& backends) {
  // spawn's processes run this too, up to their call, and have the variable already.
  setenv("TANDEM_TEST_FOLDER", fmt::format("/tmp/tandem_reproducible_{}", getpid()).c_str(), 0);
  const std::string folder = std::getenv("TANDEM_TEST_FOLDER");
  std::filesystem::create_directory(folder);
  std::vector<std::string> names;
  const auto add = [&](const std::string& name) {
    const std::string before = names.empty() ? name : names.back();
    names.push_back(name);
    return before;
  };
  for (const char* backend : {"shm", "gloo"}) {
    if (backends.find(backend) == std::string::npos) continue;
    for (const int ranks : {2, 4}) {
      if (ranks == 4 && backend == std::string("gloo")) continue;  // slow where there are fewer cores
      const std::string name = fmt::format("{}{}", backend, ranks), before = add(name);
      const int code = parallel::spawn([&](int, int) { run_ranks(backend, folder, name, before); }, {.nprocs = ranks});
      if (code != 0) return code;
    }
  }
  for (const int count : {1, 2, 4}) {
    {
      set_cpu_device_count(count);
      set_num_threads(std::max(2, count));
      const std::string name = fmt::format("devices{}", count), before = add(name);
      run_mode({.devices = count}, folder, name, before);
    }
    const std::string name = fmt::format("threads{}", count), before = add(name);
    parallel::spawn_threads([&](int, int) { run_ranks("thread", folder, name, before); }, {.nthreads = count});
  }
  for (const std::string& name : names)
    for (const int which : {0, 1}) {
      const std::string other = file_of(folder, names.front() + ".txt", which),
                        own = file_of(folder, name + ".txt", which);
      test::require(read(own) == read(other), fmt::format("case {}: {} has\n{}but {} has\n{}", which, name, read(own),
                                                          names.front(), read(other)));
      // Threads that are ranks draw what is not a part's from streams of their own, which the one process has used.
      if (name.starts_with("threads")) continue;
      test::require(read(file_of(folder, name, which)) == read(file_of(folder, names.front(), which)),
                    fmt::format("case {}: the files of {} and {} have the same bytes", which, name, names.front()));
    }
  std::filesystem::remove_all(folder);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  try {
    if (std::string(argv[1]) != "mpi") return all_modes(argv[1]);
    compare_with_one_device("mpi");
    return 0;
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
