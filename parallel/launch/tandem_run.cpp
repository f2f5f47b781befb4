// tandem-run: starts a program once for each rank.
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/core.h>

#include <tandem/parallel/launch/launcher.h>
#include <tandem/tensor/error.h>

namespace {

constexpr const char* kUsage = R"(usage: tandem-run -n N [--] PROGRAM [ARGUMENTS...]

Starts PROGRAM N times on this host, as ranks 0 to N-1 of one job. Each process finds its place in the variables RANK,
LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; the cores are divided between them by
OMP_NUM_THREADS unless it is set. Output lines are prefixed by the rank. When a rank fails it is named, and the others
are ended.

  -n N, --nproc-per-node N   number of processes (default 1)
  -h, --help                 this text

example: tandem-run -n 2 examples/fashion_mnist --parallel ddp --epochs 1
)";

int fail_usage(std::string_view message) {
  fmt::print(stderr, "tandem-run: {}\n{}", message, kUsage);
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  int nprocs = 1, i = 1;
  for (; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "-h" || argument == "--help") {
      fmt::print("{}", kUsage);
      return 0;
    }
    if (argument == "-n" || argument == "--nproc-per-node") {
      const std::string_view value = ++i < argc ? argv[i] : "";
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), nprocs);
      if (error != std::errc() || end != value.data() + value.size() || nprocs < 1)
        return fail_usage(fmt::format("-n needs a number of processes, not '{}'", value));
    } else if (argument == "--") {
      ++i;
      break;
    } else if (argument.starts_with("-")) {
      return fail_usage(fmt::format("unknown option '{}'", argument));
    } else {
      break;
    }
  }
  if (i >= argc) return fail_usage("there is no program to start");
  try {
    return tandem::parallel::launch({argv + i, argv + argc}, {.nprocs = nprocs, .announce = true});
  } catch (const tandem::Error& e) {
    fmt::print(stderr, "tandem-run: {}\n", e.what());
    return 1;
  }
}
