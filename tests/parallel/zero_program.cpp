// The cases of ZeroRedundancyOptimizer over real processes. Ends with 1 on a fault. failure_test.py has lost ranks.
// usage: zero_program BACKEND
#include <tandem/tests/parallel/zero_cases.h>

using namespace tandem;

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string backend = argv[1];
  auto body = [&](int rank, int ranks) {
    parallel::init_process_group({.backend = backend});
    for (const test::DdpCase& c : test::zero_cases()) try {
        c.run(parallel::default_group());
      } catch (const std::exception& e) {
        throw Error(fmt::format("{}, rank {} of {}: {}", c.name, rank, ranks, e.what()));
      }
    parallel::destroy_process_group();
  };
  const int code = parallel::spawn(body, {.nprocs = 2});
  return code != 0 ? code : parallel::spawn(body, {.nprocs = 3});
}
