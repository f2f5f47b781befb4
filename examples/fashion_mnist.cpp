// Trains the MLP 784-512-512-10 on Fashion-MNIST, on one device or data-parallel; `--help` lists the options.
#include <tandem/tandem.h>
#include <tandem/tensor/io/atomic_file.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>

#include "fashion_mnist_options.h"
#include "fashion_mnist_report.h"

using namespace tandem;

using parallel::DataParallelOptions;
using DdpOptions = parallel::DistributedDataParallelOptions;

namespace {

struct Net : nn::Module {
  Net() {
    flatten = register_module("flatten", nn::Flatten());
    linear_relu_stack = register_module(
        "linear_relu_stack",
        nn::Sequential(nn::Linear(28 * 28, 512), nn::ReLU(), nn::Linear(512, 512), nn::ReLU(), nn::Linear(512, 10)));
  }
  Tensor forward(const Tensor& x) override { return linear_relu_stack(flatten(x)); }
  nn::Flatten flatten{nullptr};
  nn::Sequential linear_relu_stack{nullptr};
};

std::unique_ptr<optim::Optimizer> make_optimizer(const Options& o, const std::vector<Tensor>& parameters) {
  if (o.optimizer == "adam") {
    return std::make_unique<optim::Adam>(parameters, optim::AdamOptions{.lr = o.lr, .weight_decay = o.weight_decay});
  }
  if (o.optimizer == "adamw") {
    return std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions{.lr = o.lr, .weight_decay = o.weight_decay});
  }
  return std::make_unique<optim::SGD>(
      parameters, optim::SGDOptions{.lr = o.lr, .momentum = o.momentum, .weight_decay = o.weight_decay});
}

// How often the launcher has started this job again; -1 without a launcher.
int restarts() {
  const char* count = std::getenv("RESTART_COUNT");
  return count == nullptr ? -1 : std::atoi(count);
}

// A number of the job, the same in all its starts, and in no other job; 0 without a launcher.
double job_number() {
  const char* id = std::getenv("TORCHELASTIC_RUN_ID");
  return restarts() < 0 || id == nullptr ? 0 : static_cast<double>(std::hash<std::string>()(id) >> 11);
}

// Whether the file is a checkpoint of this job, and not what an earlier run has left under that name.
bool is_of_this_job(const std::string& path) {
  if (job_number() == 0 || !std::filesystem::exists(path)) return false;
  Progress found;
  try {
    load(found, path);
  } catch (const Error&) {
    return false;
  }
  return found.numbers["job"] == job_number();
}

class Trainer {
 public:
  explicit Trainer(const Options& options)
      : o_(options),
        ddp_mode_(o_.parallel == "ddp"),
        train_set_({.root = o_.data, .train = true}),
        test_set_({.root = o_.data, .train = false}),
        device_(ddp_mode_ && o_.device == "cuda" ? parallel::local_device() : Device(o_.device)),
        resume_from_(checkpoint_to_resume()),
        report_(o_.quiet || parallel::rank() != 0, parallel::rank() == 0 ? o_.log : "", !resume_from_.empty()) {
    check_exists("fashion_mnist", device_);
    check_files();
    loss_sum_ = zeros({}, {.dtype = float64, .device = device_});
    manual_seed(static_cast<std::uint64_t>(o_.seed));
    net_ = std::make_shared<Net>();
    net_->to(device_);
    // The parallel modes: one added line each.
    if (o_.parallel == "dp")
      dp_.emplace(net_,
                  DataParallelOptions{
                      .device_ids = devices(), .check_every = o_.check_every, .reproducible_shards = o_.reproducible});
    if (o_.parallel == "ddp")
      ddp_.emplace(net_, DdpOptions{.check_every = o_.check_every, .reproducible_shards = o_.reproducible});
    // With the same bits as those, one device needs the wrapper too.
    if (o_.parallel == "none" && o_.reproducible > 0)
      dp_.emplace(net_, DataParallelOptions{.device_ids = {device_}, .reproducible_shards = o_.reproducible});
    register_comm_hook();
    const auto make = [&](const std::vector<Tensor>& parameters) { return make_optimizer(o_, parameters); };
    if (o_.zero)
      zero_.emplace(net_->parameters(), make);
    else
      optimizer_ = make(net_->parameters());
    progress_.numbers = settings();
    if (!resume_from_.empty()) resume();
  }

  void run() {
    report_.line(describe());
    if (!o_.trace.empty()) trace::start();
    // With --reproducible every rank loads whole batches.
    const std::int64_t ranks = o_.reproducible > 0 ? 1 : parallel::world_size();
    data::DataLoaderOptions batches_of_rank = loader_options(o_.batch_size / ranks);
    batches_of_rank.sampler = std::make_shared<data::DistributedSampler>(
        train_set_.size(), data::DistributedSamplerOptions{.num_replicas = ranks,
                                                           .rank = ranks > 1 ? parallel::rank() : 0,
                                                           .shuffle = o_.shuffle,
                                                           .seed = static_cast<std::uint64_t>(o_.seed),
                                                           .mode = data::DistributedMode::exact});
    data::DataLoader loader(train_set_, batches_of_rank);
    // Ranks can differ by one row, and so by one batch: the shorter one ends with an empty batch.
    const std::int64_t batches = (train_set_.size() + o_.batch_size - 1) / o_.batch_size;
    while (progress_.epoch < o_.epochs) {
      loader.set_epoch(progress_.epoch);
      loader.skip_batches(std::min(progress_.batch, loader.size()));
      report_.begin_epoch(progress_.epoch + 1, o_.epochs, progress_.batch, batches);
      auto batch = loader.begin();
      while (progress_.batch < batches) {
        const trace::Span span("step", trace::kThisThread, {"step", progress_.step});
        const std::int64_t first = progress_.batch * o_.batch_size;
        const std::int64_t rows = std::min(o_.batch_size, train_set_.size() - first);
        if (batch == loader.end()) {
          step(zeros({0, 1, 28, 28}), zeros({0}, {.dtype = int64}), rows);
        } else {
          auto& [x, y] = *batch;
          step(x, y, rows);
          ++batch;
        }
        if (o_.save_every > 0 && progress_.step % o_.save_every == 0) save_checkpoint(job_number());
      }
      finish_epoch(batches);
    }
    // The result has no job: its bytes are those of any run with these settings.
    if (!o_.save.empty()) save_checkpoint(0);
    if (!o_.trace.empty()) parallel::write_trace(o_.trace);
  }

 private:
  // What would only be noticed after hours of training is checked before.
  void check_files() const {
    for (const data::FashionMNIST* set : {&train_set_, &test_set_})
      check(set->size() > 0, "fashion_mnist", "the {} set is empty; give another folder by --data",
            set == &train_set_ ? "training" : "test");
    for (const auto& [option, path] : {std::pair("--save", o_.save), std::pair("--trace", o_.trace)}) {
      if (path.empty()) continue;
      const std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
      check(std::filesystem::is_directory(folder) && !std::filesystem::is_directory(path), "fashion_mnist",
            "{} {} cannot be written: give a file in a folder that exists", option, path);
      if (parallel::rank() == 0) const AtomicFile writable(path, "fashion_mnist");
    }
  }

  // Those of --parallel dp; none stands for all.
  DeviceIds devices() const {
    if (o_.devices == 0) return {};
    const int count = device_count(device_.type());
    check(o_.devices <= count, "fashion_mnist", "--devices {}: there {} {} CUDA device{}; give 1 to {}", o_.devices,
          count == 1 ? "is" : "are", count, count == 1 ? "" : "s", count);
    std::vector<Device> all;
    for (int i = 0; i < o_.devices; ++i) all.emplace_back(device_.type(), i);
    return all;
  }

  // While a GPU works, a thread makes the next batches in memory that is copied from beside it.
  data::DataLoaderOptions loader_options(std::int64_t batch_size) const {
    return {.batch_size = batch_size, .num_workers = device_.is_cuda() ? 1 : 0, .pin_memory = device_.is_cuda()};
  }

  void register_comm_hook() {
    if (o_.comm_hook == "fp16") ddp_->register_comm_hook(parallel::fp16_compress_hook());
    if (o_.comm_hook == "bf16") ddp_->register_comm_hook(parallel::bf16_compress_hook());
    if (o_.comm_hook == "powersgd")
      ddp_->register_comm_hook(
          powersgd_.emplace(parallel::PowerSGDOptions{.matrix_approximation_rank = o_.powersgd_rank}).hook());
  }

  // What a file of --save holds.
  template <class S>
  std::vector<StateRef<S>> saved_parts() {
    std::vector<StateRef<S>> parts = {net_, optimizer_state(), progress_};
    if (powersgd_) parts.emplace_back(*powersgd_);
    return parts;
  }

  // Progress counts batches, so it is only true for the same batches in the same order.
  std::map<std::string, double> settings() const {
    return {{"reproducible", static_cast<double>(o_.reproducible)},
            {"batch_size", static_cast<double>(o_.batch_size)},
            {"seed", static_cast<double>(o_.seed)},
            {"shuffle", o_.shuffle ? 1.0 : 0.0},
            {"optimizer", o_.optimizer == "sgd"    ? 0.0
                          : o_.optimizer == "adam" ? 1.0
                                                   : 2.0}};
  }

  // A job that the launcher has started again goes on from what it has saved. Rank 0 looks, for all.
  std::string checkpoint_to_resume() const {
    if (restarts() <= 0 || o_.save.empty()) return o_.resume;
    Tensor saved = zeros({1});
    if (parallel::rank() == 0 && is_of_this_job(o_.save)) saved = ones({1});
    if (ddp_mode_) parallel::broadcast(saved, 0);
    return saved.item<float>() != 0 ? o_.save : o_.resume;
  }

  void resume() {
    load(resume_from_, saved_parts<Stateful>(), {.map_location = device_});
    loss_sum_.fill_(progress_.numbers["loss_sum"]);
    for (const auto& [name, value] : settings())
      check(progress_.numbers[name] == value, "fashion_mnist",
            "--resume {}: it was trained with another {} ({} then, {} now); give the same settings", resume_from_, name,
            progress_.numbers[name], value);
  }

  std::string describe() const {
    const std::string where =
        dp_ ? fmt::format("DataParallel on {} device{}", dp_->devices().size(), dp_->devices().size() == 1 ? "" : "s")
        : ddp_ ? fmt::format("DistributedDataParallel on {} process{} ({})", parallel::world_size(),
                             parallel::world_size() == 1 ? "" : "es", parallel::default_group()->backend()) +
                     (zero_ ? ", optimizer divided" : "")
               : fmt::format("{}", device_);
    const int threads = num_threads() * parallel::world_size();
    std::string text =
        fmt::format("MLP 784-512-512-10, {} lr {}, batch {}, {} thread{}: {}", o_.optimizer,
                    zero_ ? zero_->lr() : optimizer_->lr(), o_.batch_size, threads, threads == 1 ? "" : "s", where);
    if (o_.reproducible > 0) text += fmt::format("\nthe same bits in every mode: {} parts", o_.reproducible);
    if (!resume_from_.empty())
      text += fmt::format("\nresumed from {}: epoch {}, batch {}", resume_from_, progress_.epoch + 1, progress_.batch);
    if (progress_.epoch >= o_.epochs) text += "\nnothing is left to do: the epochs asked for are done";
    return text;
  }

  Stateful& optimizer_state() { return zero_ ? static_cast<Stateful&>(*zero_) : *optimizer_; }

  void step(const Tensor& x, const Tensor& y, std::int64_t rows) {
    const Tensor loss = o_.graph ? step_by_graph(x, y) : train(x.to(device_, true), y.to(device_, true));
    loss_sum_ += loss;
    // A GPU is given several steps ahead: to ask for a value is to wait for it.
    constexpr std::int64_t kStepsAhead = 8;
    if (!device_.is_cuda() || progress_.step % kStepsAhead == 0) shown_loss_ = loss.item<double>();
    ++progress_.batch;
    ++progress_.step;
    report_.step(progress_.batch, rows, shown_loss_);
  }

  // A step as a user would write it; the loss before it.
  Tensor train(const Tensor& x, const Tensor& y) {
    const Tensor loss = dp_ ? dp_->loss(loss_fn_, x, y) : ddp_ ? ddp_->loss(loss_fn_, x, y) : plain_loss(x, y);
    loss.backward();
    zero_ ? zero_->step() : optimizer_->step();
    net_->zero_grad();
    return loss.detach();
  }

  // The same for a CUDA device, which is given the whole step by one launch. Its batches are copied into fixed tensors;
  // the last batch of an epoch may have another size and is an ordinary step.
  Tensor step_by_graph(const Tensor& x, const Tensor& y) {
    if (x.size(0) != o_.batch_size) return train(x.to(device_, true), y.to(device_, true));
    if (!fixed_x_.defined()) {
      fixed_x_ = empty(x.shape(), {.dtype = x.dtype(), .device = device_});
      fixed_y_ = empty(y.shape(), {.dtype = y.dtype(), .device = device_});
    }
    fixed_x_.copy_(x, true);
    fixed_y_.copy_(y, true);
    if (ordinary_steps_ < 3) {  // these make what is made once, and choose how products are computed
      ++ordinary_steps_;
      return train(fixed_x_, fixed_y_);
    }
    if (!graph_) graph_.emplace(device_).capture([this] { fixed_loss_ = train(fixed_x_, fixed_y_); });
    graph_->replay();
    return fixed_loss_;
  }

  Tensor plain_loss(const Tensor& x, const Tensor& y) {
    const trace::Span span("forward");
    const trace::DeviceSpan device_span("forward", device_);
    return loss_fn_((*net_)(x), y);
  }

  // In DDP each rank has summed its own share of the losses; the mean over the ranks is that of the whole batches.
  void average_loss_over_ranks() {
    if (ddp_ && o_.reproducible == 0) parallel::all_reduce(loss_sum_, {.op = parallel::ReduceOp::avg});
    progress_.numbers["loss_sum"] = loss_sum_.item<double>();
  }

  void save_checkpoint(double job) {
    average_loss_over_ranks();
    progress_.numbers.erase("job");
    if (job != 0) progress_.numbers["job"] = job;
    if (powersgd_) powersgd_->gather_state();
    const auto parts = saved_parts<const Stateful>();
    if (ddp_) parallel::save_checkpoint(o_.save, parts);
    if (!ddp_) save(o_.save, parts);
  }

  void finish_epoch(std::int64_t batches) {
    EpochResult result;
    average_loss_over_ranks();  // waits for a GPU's steps
    result.samples_per_s = report_.samples_per_s();
    result.train_loss = progress_.numbers["loss_sum"] / static_cast<double>(batches);
    progress_.numbers["loss_sum"] = 0;
    loss_sum_.fill_(0);
    progress_.batch = 0;
    result.epoch = ++progress_.epoch;
    if (parallel::rank() == 0) evaluate(result);
    if (ddp_) parallel::barrier();
    report_.end_epoch(result);
  }

  void evaluate(EpochResult& result) {
    const trace::Span span("evaluate");
    const NoGradGuard no_grad;
    net_->eval();
    const nn::CrossEntropyLoss sum_of_losses({.reduction = Reduction::sum});
    std::int64_t correct = 0;
    for (auto& [x, y] : data::DataLoader(test_set_, loader_options(500))) {
      const Tensor logits = (*net_)(x.to(device_, true)), labels = y.to(device_, true);
      result.test_loss += sum_of_losses(logits, labels).item<double>();
      correct += sum(argmax(logits, 1) == labels).item<std::int64_t>();
    }
    const auto count = static_cast<double>(test_set_.size());
    result.test_loss /= count;
    result.test_accuracy = static_cast<double>(correct) / count;
    net_->train();
  }

  const Options o_;
  const bool ddp_mode_;
  data::FashionMNIST train_set_, test_set_;
  const Device device_;
  const std::string resume_from_;  // empty: begin anew
  Report report_;
  std::shared_ptr<Net> net_;
  std::unique_ptr<optim::Optimizer> optimizer_;  // one of the two
  std::optional<parallel::ZeroRedundancyOptimizer> zero_;
  std::optional<parallel::DataParallel> dp_;
  std::optional<parallel::DistributedDataParallel> ddp_;
  std::optional<parallel::PowerSGD> powersgd_;
  nn::CrossEntropyLoss loss_fn_;
  Tensor loss_sum_;  // of this epoch's batches, on the device
  double shown_loss_ = 0;
  Progress progress_;
  // Of --graph.
  Tensor fixed_x_, fixed_y_, fixed_loss_;
  int ordinary_steps_ = 0;
  std::optional<cuda::Graph> graph_;
};

void train_as_rank(const Options& o) {
  parallel::init_process_group({.backend = o.backend});
  const int ranks = parallel::world_size();
  check(o.reproducible > 0 || o.batch_size % ranks == 0, "fashion_mnist",
        "--batch-size {} cannot be divided evenly among {} processes; give a multiple of {}", o.batch_size, ranks,
        ranks);
  if (o.threads > 0) set_num_threads(std::max(1, o.threads / ranks));
  Trainer(o).run();
  parallel::destroy_process_group();
}

int run(const Options& o) {
  const bool is_rank = parallel::is_launched();
  check(!is_rank || o.parallel == "ddp", "fashion_mnist",
        "several processes were started, but --parallel is {}; give --parallel ddp", o.parallel);
  if (o.parallel == "ddp") {
    if (o.nproc > 0) return parallel::spawn([&](int, int) { train_as_rank(o); }, {.nprocs = o.nproc});
    check(is_rank, "fashion_mnist",
          "--parallel ddp needs several processes: give --nproc 2, or start it as `tandem-run -n 2 fashion_mnist ...`");
    train_as_rank(o);
    return 0;
  }
  if (o.threads > 0) set_num_threads(o.threads);
  if (o.parallel == "dp" && o.device == "cpu")
    set_cpu_device_count(o.devices > 0 ? o.devices : std::max(2, device_count(DeviceType::cpu)));
  Trainer(o).run();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (const int code = parse_options(argc, argv, options); code >= 0) return code;
  try {
    return run(options);
  } catch (const Error& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
