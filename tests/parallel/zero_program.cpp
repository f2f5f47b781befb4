// The cases of ZeroRedundancyOptimizer over real processes. Ends with 1 on a fault. failure_test.py has lost ranks.
// usage: zero_program BACKEND; for mpi it is one rank, which mpirun starts
#include <tandem/tests/parallel/zero_cases.h>

using namespace tandem;

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string backend = argv[1];
  auto all_cases = [&](int, int) {
    parallel::init_process_group({.backend = backend});
    for (const test::DdpCase& c : test::zero_cases()) try {
        c.run(parallel::default_group());
      } catch (const std::exception& e) {
        throw Error(fmt::format("{}, rank {}: {}", c.name, parallel::rank(), e.what()));
      }
    parallel::destroy_process_group();
  };
  if (backend == "mpi") {
    try {
      all_cases(0, 0);
      return 0;
    } catch (const std::exception& e) {
      fmt::print(stderr, "{}\n", e.what());
      return 1;
    }
  }
  const int code = parallel::spawn(all_cases, {.nprocs = 2});
  return code != 0 ? code : parallel::spawn(all_cases, {.nprocs = 3});
}
