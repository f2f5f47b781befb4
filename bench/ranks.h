// Benchmarks of processes that they start themselves.
#pragma once
#include <string>

#include <tandem/tandem.h>

namespace bench {

/// Calls measure(rank) in `nproc` processes of one thread each, as ranks of a job. Returns the exit code; what is wrong
/// is printed.
template <class Measure>
int run_ranks(int nproc, const std::string& backend, const Measure& measure) {
  using namespace tandem;
  try {
    return parallel::spawn(
        [&](int rank, int) {
          parallel::init_process_group({.backend = backend});
          set_num_threads(1);
          measure(rank);
          parallel::destroy_process_group();
        },
        {.nprocs = nproc});
  } catch (const Error& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}

}  // namespace bench
