// The backend nccl over real processes, or over threads as ranks. Ends with 1 on a fault.
// usage: nccl_program threads|processes
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include <tandem/tandem.h>
#include <tandem/tensor/cuda.h>
#include <tandem/tensor/cuda_graph.h>
#include <tandem/tests/cuda/nccl_cases.h>
#include <tandem/tests/parallel/collective_cases.h>
#include <tandem/tests/parallel/proofs.h>

using namespace tandem;
using test::require;
using test::require_error;

namespace {

void cases_of(const std::shared_ptr<parallel::ProcessGroup>& group, Device device) {
  require(group->backend() == "nccl" && group->serves(device), "the backend");
  test::gpu_collective_cases(*group, device);
  test::gpu_memory_cases(*group, device);
  test::gpu_order_cases(*group, device);
  test::gpu_training_cases(group, device);
  if (group->size() == 2) test::gpu_graph_cases(group, device);
  if (group->size() == 2) test::gpu_divided_graph_cases(group, device);
  test::collective_cases_of(*group, float32, 100);  // on the CPU
  test::gpu_error_cases(*group, device);
  if (group->size() == 2) test::gpu_device_cases(group, device);
}

void run(int rank, int ranks) {
  parallel::init_process_group();  // nccl, since there are devices
  const Device device = parallel::local_device();
  require(device == Device(DeviceType::cuda, rank), "the rank's device");
  cases_of(parallel::default_group(), device);
  std::vector<int> all;
  for (int r = 0; r < ranks; ++r) all.push_back(r);
  auto again = parallel::new_group(all);  // after errors another group works on
  const auto first = parallel::new_group({0});
  Tensor t = ones({3}, {.device = device});
  parallel::all_reduce(t, {.group = again});
  require(t.to(Device()).to_vector<float>() == std::vector<float>(3, static_cast<float>(ranks)),
          "a sum in another group");
  if (rank == 0) {  // a child that calls disturbs nobody
    const pid_t child = fork();
    if (child == 0) {
      try {
        require_error("it can take no part", [&] { parallel::all_reduce(t, {.group = again}); });
        require_error("it can take no part", [&] { (void)again->allocate({2}, float32, device); });
        _exit(0);
      } catch (...) {
        _exit(1);
      }
    }
    int status = -1;
    require(waitpid(child, &status, 0) == child && status == 0, "a forked child");
  }
  parallel::all_reduce(t, {.group = again});
  if (rank > 0) require_error("not a member", [&] { parallel::all_reduce(t, {.group = first}); });
  Tensor unfinished = ones({1000}, {.device = device});
  (void)again->all_reduce(unfinished);  // ends with the group
  again.reset();
  parallel::destroy_process_group();
}

// A rank dies when all have agreed on a collective, before its GPU has come to it: those of the others wait for it.
void lost_in_flight(int rank, int) {
  parallel::init_process_group();
  const Device device = parallel::local_device();
  const auto group = parallel::default_group();
  Tensor t = ones({1000}, {.device = device}), busy = ones({2'000'000}, {.device = device});
  group->all_reduce(t).wait();
  require(t.to(Device())[0].item<double>() == 3, "a sum before");
  group->barrier().wait();
  for (int i = 0; rank == 2 && i < 200; ++i) busy.add_(1.0);
  const parallel::Work work = group->all_reduce(t), next = group->all_reduce(t);
  work.wait();
  next.wait();  // the ranks have agreed, and the host does not wait for the GPU
  if (rank == 2) kill(getpid(), SIGKILL);
  const auto start = std::chrono::steady_clock::now();
  const std::string text = fmt::format(
      "rank {} of 3: rank 2 was killed by signal 9 (Killed) while this rank waited in all_reduce (sum, call", rank);
  if (rank == 0)
    require_error(text, [&] { (void)t.to(Device()); });
  else
    require_error(text, [&] { cuda::synchronize(device); });
  require(std::chrono::steady_clock::now() - start < std::chrono::seconds(10), "in time");
  cuda::synchronize(device);  // it is thrown once
  for (int i = 0; i < 2; ++i) require_error("rank 2 was killed by signal 9", [&] { group->all_reduce(t).wait(); });
  test::prove(rank);
}

// A rank dies while another one allocates, whose GPU waits for it in a graph that it alone replays once more.
void lost_in_allocate(int rank, int) {
  parallel::init_process_group();
  const Device device = parallel::local_device();
  const auto group = parallel::default_group();
  Tensor t = ones({1000}, {.device = device});
  (void)group->allocate({100}, float32, device);  // goes back in the next allocate
  for (int i = 0; i < 3; ++i) group->all_reduce(t).wait();
  cuda::Graph graph(device);
  graph.capture([&] { group->all_reduce(t).wait(); });
  graph.replay();
  if (rank == 0) graph.replay();
  std::thread end;
  if (rank == 1)
    end = std::thread([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      kill(getpid(), SIGKILL);
    });
  require_error("rank 1 was killed by signal 9", [&] { (void)group->allocate({200}, float32, device); });
  require_error("rank 1 was killed by signal 9", [&] { graph.replay(); });
  require_error("rank 0 of 2: an earlier collective failed", [&] { graph.replay(); });
  test::prove(rank);
}

// Several ranks on one device, which NCCL refuses.
void share_a_device(int rank, int) {
  parallel::init_process_group({.backend = "nccl"});
  Tensor t = ones({3}, {.device = Device(DeviceType::cuda, 1)});
  const parallel::Work work = parallel::default_group()->all_reduce(t);
  for (int i = 0; i < 2; ++i) require_error("cannot connect on cuda:1", [&] { work.wait(); });
  require_error("cannot connect on cuda:1", [&] { parallel::all_reduce(t); });
  parallel::barrier();
  parallel::destroy_process_group();
  // A model on a GPU needs the backend.
  parallel::init_process_group({.backend = "shm"});
  auto net = std::make_shared<nn::LinearImpl>(2, 3);
  net->to(Device(DeviceType::cuda, rank));
  require_error("over shm, which serves tensors of the CPU", [&] { parallel::DistributedDataParallel ddp(net); });
  require_error("but the ranks work together over shm, which serves tensors of the CPU",
                [&] { (void)parallel::ZeroRedundancyOptimizer::make<optim::SGD>(net->parameters(), {.lr = 0.1}); });
  require_error("the backend shm works on tensors of the CPU, and nccl", [&] { parallel::all_reduce(t); });
  require_error("the backend shm works on tensors of the CPU",
                [&] { (void)parallel::default_group()->allocate({2}, float32, t.device()); });
  parallel::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  if (std::string(argv[1]) == "threads") {
    try {
      for (const int ranks : {1, 2, 4})
        parallel::spawn_threads(
            [](int rank, int all) {
              parallel::init_process_group({.backend = "nccl"});
              cases_of(parallel::default_group(), parallel::local_device());
              require(parallel::local_device() == Device(DeviceType::cuda, rank) && all <= 4, "the rank's device");
              parallel::destroy_process_group();
            },
            {.nthreads = ranks});
    } catch (const std::exception& e) {
      fmt::print(stderr, "{}\n", e.what());
      return 1;
    }
    return 0;
  }
  for (const int ranks : {1, 2, 4})
    if (const int code = parallel::spawn(run, {.nprocs = ranks}); code != 0) return code;
  if (const int code = parallel::spawn(share_a_device, {.nprocs = 2}); code != 0) return code;
  return test::run("a rank dies in flight", 137, {0, 1}, lost_in_flight, 3) +
         test::run("a rank dies in allocate", 137, {0}, lost_in_allocate, 2);
}
