// The cases of DistributedDataParallel over real processes. Ends with 1 on a fault.
// usage: ddp_program BACKEND; for mpi it is one rank, which mpirun starts
#include <chrono>
#include <thread>

#include <tandem/tests/parallel/ddp_cases.h>

using namespace tandem;

namespace {

// pytorch#33148, #38174: ranks with different numbers of batches hung. The rank that goes on learns who does not come.
void uneven_batches(int rank, int ranks, const std::string& backend) {
  parallel::init_process_group({.backend = backend});  // the short time is not for the start of the processes
  parallel::barrier();
  parallel::destroy_process_group();
  parallel::init_process_group({.backend = backend, .timeout_seconds = 0.5});
  parallel::DistributedDataParallel ddp(test::make_mlp());
  auto step = [&] { mean(ddp(test::wave({2, 6}, 1))).backward(); };
  for (int batch = 0; batch < 5; ++batch) step();
  if (rank == ranks - 1)
    test::require_error({fmt::format("rank {} of {}: ", rank, ranks), "rank 0", "call "}, step);
  else
    std::this_thread::sleep_for(std::chrono::seconds(2));
  parallel::destroy_process_group();
}

void all_cases(const std::string& backend) {
  parallel::init_process_group({.backend = backend});
  test::run_ddp_cases(parallel::default_group());
  parallel::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string backend = argv[1];
  if (backend == "mpi") {
    try {
      all_cases(backend);
      return 0;
    } catch (const std::exception& e) {
      fmt::print(stderr, "{}\n", e.what());
      return 1;
    }
  }
  // Gloo's messages are slow where there are fewer cores than ranks, and its own tests have all numbers of ranks.
  for (const int ranks : backend == "gloo" ? std::vector{3} : std::vector{1, 2, 3, 4}) {
    const int code = parallel::spawn([&](int, int) { all_cases(backend); }, {.nprocs = ranks});
    if (code != 0) return code;
  }
  return parallel::spawn([&](int rank, int ranks) { uneven_batches(rank, ranks, backend); }, {.nprocs = 2});
}
