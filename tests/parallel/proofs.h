// For programs whose ranks end: the others prove that they have seen it, since the exit code is that of the lost one.
#pragma once
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <tandem/tandem.h>

namespace tandem::test {

/// The file by which a rank that `launcher` started proves something.
inline std::string proof(pid_t launcher, int rank) {
  return (std::filesystem::temp_directory_path() / fmt::format("tandem_proof_{}_{}", launcher, rank)).string();
}
inline void prove(int rank) { std::ofstream(proof(getppid(), rank)) << "seen"; }
inline bool proved(pid_t launcher, int rank) { return std::filesystem::exists(proof(launcher, rank)); }
/// Until these ranks have proved, or a while longer than that may take; false then.
inline bool wait_for_proofs(pid_t launcher, const std::vector<int>& ranks) {
  for (int i = 0; i < 2000; ++i) {
    bool all = true;
    for (const int r : ranks) all = all && proved(launcher, r);
    if (all) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

/// Calls spawn; 0 if its exit code is as expected and all survivors have proved to have seen what they should.
inline int run(std::string_view name, int expected, const std::vector<int>& survivors, FunctionRef<void(int, int)> body,
               int ranks, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const int code = parallel::spawn(body, {.nprocs = ranks}, file, line);
  if (std::getenv("RANK") != nullptr) return 0;  // a process of a later call passes the earlier ones
  bool good = code == expected;
  for (const int r : survivors) good &= std::filesystem::remove(proof(getpid(), r));
  if (!good) fmt::print(stderr, "FAULT in '{}': exit code {} (expected {})\n", name, code, expected);
  return good ? 0 : 1;
}

}  // namespace tandem::test
