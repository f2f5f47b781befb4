// Processes: joining and leaving a job, and groups of some of its ranks. Ends with 1 on a fault.
// usage: distributed_program BACKEND
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>

#include <tandem/tandem.h>
#include <tandem/tests/parallel/collective_cases.h>

using namespace tandem;

using test::require;
using test::require_error;

namespace {

void run(int rank, int ranks, const std::string& backend) {
  require_error("call init_process_group first", [] { (void)parallel::default_group(); });
  require_error("a rank of a job that it has not joined", [] { (void)parallel::rank(); });
  require_error("backend 'pigeon' is not built in", [] { parallel::init_process_group({.backend = "pigeon"}); });
  parallel::init_process_group({.backend = backend});
  require_error("joined already", [] { parallel::init_process_group(); });
  require_error("start all processes in one call", [] { parallel::spawn([](int, int) {}, {.nprocs = 2}); });
  require(parallel::rank() == rank && parallel::world_size() == ranks, "rank and size");
  require(parallel::default_group()->backend() == backend, "backend");
  require_error("the list of ranks is empty", [] { (void)parallel::new_group({}); });
  require_error("rank 7 is out of range: the job has ranks 0 to", [] { (void)parallel::new_group({0, 7}); });
  require_error("rank 0 is given twice", [] { (void)parallel::new_group({0, 0}); });
  const auto first_two = parallel::new_group({0, 1});
  require_error("the ranks disagree: this rank calls new_group(", [&] {
    (void)parallel::new_group(rank == 1 ? std::vector{0, 1} : std::vector{0, 2});
  });
  Tensor t = ones({1});
  if (rank < 2)
    parallel::all_reduce(t, {.group = first_two});
  else
    require_error("not a member", [&] { parallel::barrier({.group = first_two}); });
  require(t.item<int>() == (rank < 2 ? 2 : 1), "sum in a group");
  parallel::destroy_process_group();
  // A program that a rank starts may spawn its own.
  if (rank == 0) {
    const std::string inner = std::filesystem::read_symlink("/proc/self/exe").string() + " inner";
    const int status = std::system(inner.c_str());
    require(WIFEXITED(status) && WEXITSTATUS(status) == 4, "a program within a rank has spawned");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string backend = argv[1];
  if (backend == "inner") return parallel::spawn([](int, int) { std::_Exit(4); }, {.nprocs = 2});
  const int thrown = parallel::spawn([](int, int) { throw 42; }, {.nprocs = 1});  // of a type that nobody expects
  if (std::getenv("RANK") == nullptr && thrown != 1) return 3;
  return parallel::spawn([&](int rank, int ranks) { run(rank, ranks, backend); }, {.nprocs = 3});
}
