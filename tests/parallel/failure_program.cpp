// One rank of a job in which something breaks, for failure_test.py: trains or sums, and says how it ended. A line
// "@RANK done", "@RANK lost OTHER TEXT" or "@RANK error TEXT" is the last that a rank prints.
// usage: failure_program BACKEND TIMEOUT train STEPS [FILE [at-once]]   DDP; saves to the file at each step
//        failure_program BACKEND TIMEOUT zero STEPS [FILE]              the same with a divided optimizer
//        failure_program BACKEND TIMEOUT join STEPS                     DDP, where rank 0 has two batches
//        failure_program BACKEND TIMEOUT CALLS                          "sums", or calls in which the last rank differs
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

#include <tandem/tandem.h>
#include <tandem/tensor/fault.h>

using namespace tandem;

namespace {

std::vector<std::string> arguments;

void say(int rank, const std::string& text) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  fmt::print("@{} {}\n", rank, text);
  std::fflush(stdout);
}

// What the ranks compute on: GPUs over nccl.
Device device() { return arguments[1] == "nccl" ? Device(DeviceType::cuda, parallel::rank()) : Device(); }

std::shared_ptr<nn::SequentialImpl> make_net() {
  auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(32, 128), nn::ReLU(), nn::Linear(128, 128), nn::ReLU(),
                                                  nn::Linear(128, 8));
  net->to(device());
  return net;
}

// A bucket for each layer, so that the first is launched long before the last gradient has come.
template <class Optimizer>
void train(int steps, const std::string& file, Optimizer (*make)(std::vector<Tensor>)) {
  manual_seed(1);
  auto net = make_net();
  parallel::DistributedDataParallel model(net, {.bucket_cap_mb = 1e-3, .first_bucket_mb = 1e-3});
  Optimizer optimizer = make(net->parameters());
  const Tensor x = randn({8, 32}).to(device()), y = randint(0, 8, {8}).to(device());
  for (int step = 0; step < steps; ++step) {
    model.loss(nn::CrossEntropyLoss(), x, y).backward();
    optimizer.step();
    optimizer.zero_grad();
    if (!file.empty()) parallel::save_checkpoint(file, {net, optimizer});
  }
}

void train(int steps, const std::string& file, bool divided) {
  const auto alone = [](std::vector<Tensor> p) { return optim::Adam(std::move(p), {.lr = 1e-2}); };
  const auto zero = [](std::vector<Tensor> p) {
    return parallel::ZeroRedundancyOptimizer::make<optim::Adam>(std::move(p), {.lr = 1e-2});
  };
  divided ? train<parallel::ZeroRedundancyOptimizer>(steps, file, zero) : train<optim::Adam>(steps, file, alone);
}

// Rank 0 has two batches, and shadows the others from then on.
void train_joined(int rank, int steps) {
  manual_seed(1);
  auto net = make_net();
  parallel::DistributedDataParallel model(net, {.bucket_cap_mb = 1e-3, .first_bucket_mb = 1e-3});
  optim::Adam optimizer(net->parameters(), {.lr = 1e-2});
  const Tensor x = randn({8, 32}).to(device()), y = randint(0, 8, {8}).to(device());
  model.join([&] {
    for (int step = 0; step < (rank == 0 ? 2 : steps); ++step) {
      model.loss(nn::CrossEntropyLoss(), x, y).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

void call(const std::string& what, bool odd) {
  const TensorOptions here{.device = device()};
  Tensor t = ones({1000}, here), other = ones({999}, here), all = empty({1000 * parallel::world_size()}, here);
  if (what == "sums") {
    t = ones({3'000'000}, here);
    for (int i = 0; i < 8; ++i) parallel::all_reduce(t);
  } else if (what == "another-collective") {
    odd ? parallel::all_gather(all, t) : parallel::all_reduce(t);
  } else if (what == "another-shape") {
    parallel::all_reduce(odd ? other : t);
  } else if (what == "another-order") {
    odd ? parallel::barrier() : parallel::broadcast(t, 0);
    odd ? parallel::broadcast(t, 0) : parallel::barrier();
  } else if (what == "one-less") {  // the others call once more
    for (int i = 0; i < (odd ? 2 : 3); ++i) parallel::all_reduce(t);
  } else if (what == "behind") {  // the ranks have agreed, and rank 0's GPU comes later; its end is the point "step"
    Tensor busy = ones({2'000'000}, here);
    parallel::all_reduce(t);
    parallel::barrier();
    for (int i = 0; i < 200 && parallel::rank() == 0; ++i) busy.add_(1.0);
    parallel::all_reduce(t);
    fault::point(fault::Point::step);
    (void)t.to(Device());
  } else {
    fail("failure_program", "unknown call '{}'", what);
  }
}

// The rank as launchers say it, or as the test does that starts the ranks by hand.
int number_of(std::initializer_list<const char*> variables) {
  for (const char* variable : variables)
    if (const char* text = std::getenv(variable)) return std::atoi(text);
  fail("failure_program", "the environment does not say which rank this is");
}

void run_rank(int rank, int ranks) {
  const std::string &backend = arguments[1], &what = arguments[3];
  const double timeout = std::atof(arguments[2].c_str());
  const bool at_once = arguments.size() > 6;
  if (timeout < 10 && !at_once) {  // a short time is not for the start of the processes
    parallel::init_process_group({.backend = backend, .rank = rank, .world_size = ranks});
    parallel::barrier();
    parallel::destroy_process_group();
  }
  parallel::init_process_group({.backend = backend, .rank = rank, .world_size = ranks, .timeout_seconds = timeout});
  say(rank, "joined");
  if (what == "train" || what == "zero")
    train(std::atoi(arguments[4].c_str()), arguments.size() > 5 ? arguments[5] : "", what == "zero");
  else if (what == "join")
    train_joined(rank, std::atoi(arguments[4].c_str()));
  else
    call(what, rank == ranks - 1);
  parallel::barrier();
  parallel::destroy_process_group();
}

// Says how the rank ended; the text of its error, if any.
std::string report(int rank, int ranks) {
  try {
    say(rank, fmt::format("pid {}", getpid()));
    run_rank(rank, ranks);
    say(rank, "done");
    return {};
  } catch (const parallel::CommError& e) {
    std::string text = e.what();
    bool again = !parallel::is_initialized() || text.find("the ranks disagree") != std::string::npos;
    try {
      if (!again) parallel::barrier();  // throws at once, too
    } catch (const parallel::CommError&) {
      again = true;
    }
    say(rank, again ? fmt::format("lost {} {}", e.rank(), text) : "error: a call after the loss succeeded");
    return text;
  } catch (const std::exception& e) {
    say(rank, fmt::format("error {}", e.what()));
    return e.what();
  }
}

}  // namespace

int main(int argc, char** argv) {
  arguments.assign(argv, argv + argc);
  if (argc < 4) return 2;
  alarm(60);  // a rank that hangs is a fault, and ends
  if (arguments[1] != "thread")
    return report(number_of({"RANK", "OMPI_COMM_WORLD_RANK", "BY_HAND_RANK"}),
                  number_of({"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "BY_HAND_SIZE"}))
                   .empty()
               ? 0
               : 1;
  try {
    parallel::spawn_threads(
        [](int rank, int ranks) {
          if (const std::string text = report(rank, ranks); !text.empty()) throw Error(text);  // the others learn of it
        },
        {.nthreads = 3});
  } catch (const Error&) {
    return 1;
  }
}
