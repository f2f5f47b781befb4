// all_reduce: how long summing one tensor over the ranks takes, by backend and size, with the bandwidths that
// nccl-tests defines.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include <tandem/parallel/comm/start_environment.h>
#include <tandem/tandem.h>

#include "options.h"
#include "timing.h"

using namespace tandem;

namespace {

using Clock = std::chrono::steady_clock;

struct Settings {
  int ranks = 2;
  std::vector<std::string> backends{"shm"};
  std::vector<std::int64_t> bytes{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20,
                                  2678824, 4 << 20,  16 << 20, 64 << 20};
  bool fresh = true, plain = false;
  int iterations = 0;
};

int iterations_for(const Settings& settings, std::int64_t bytes) {
  constexpr std::int64_t kBytesMoved = 512 << 20;
  return settings.iterations > 0 ? settings.iterations
                                 : static_cast<int>(std::clamp<std::int64_t>(kBytesMoved / bytes, 20, 2000));
}

// What rank r writes at i, small enough for exact sums.
void write_data(Tensor& t, int rank) {
  float* values = t.data<float>();
  const std::int64_t n = t.numel();
  for (std::int64_t i = 0; i < n; ++i) values[i] = static_cast<float>(rank + (i & 63));
}

void check_sums(const Tensor& t, int ranks) {
  const float* values = t.data<float>();
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    const auto expected = static_cast<float>(ranks * (ranks - 1) / 2 + ranks * (i & 63));
    check(values[i] == expected, "all_reduce", "element {} is {}, but should be {}", i, values[i], expected);
  }
}

// Microseconds of each iteration on the slowest rank.
std::vector<double> measure(parallel::ProcessGroup& group, std::int64_t bytes, const Settings& settings) {
  Tensor t = settings.plain ? zeros({bytes / 4}) : group.allocate({bytes / 4}, float32);
  write_data(t, group.rank());
  group.all_reduce(t).wait();
  check_sums(t, group.size());
  const int iterations = iterations_for(settings, bytes), warm_up = 5 + iterations / 10;
  Tensor mine = zeros({iterations}, {.dtype = float64});
  double* times = mine.data<double>();
  for (int i = -warm_up; i < iterations; ++i) {
    if (settings.fresh)
      write_data(t, group.rank());
    else if (i % 16 == 0)
      t.zero_();  // sums of sums would overflow
    group.barrier().wait();
    const auto start = Clock::now();
    group.all_reduce(t).wait();
    const auto end = Clock::now();
    group.barrier().wait();  // nobody writes the next data while a rank that shares its core is not done
    if (i >= 0) times[i] = std::chrono::duration<double, std::micro>(end - start).count();
  }
  group.all_reduce(mine, parallel::ReduceOp::max).wait();
  return mine.to_vector<double>();
}

void measure_backend(const std::string& backend, const Settings& settings, nlohmann::json& records) {
  parallel::init_process_group({.backend = backend, .timeout_seconds = 300});
  const auto group = parallel::default_group();
  for (const std::int64_t bytes : settings.bytes) {
    const std::vector<double> times = measure(*group, bytes, settings);
    if (group->rank() != 0) continue;
    const double median = bench::median(times), algorithm = static_cast<double>(bytes) / median * 1e-3;
    const double bus = algorithm * 2 * (group->size() - 1) / group->size();
    const double p10 = bench::quantile(times, 0.1), p90 = bench::quantile(times, 0.9);
    fmt::print("{:>8} {:>5} {:>10} {:>6} {:>12.2f} {:>10.2f} {:>10.2f} {:>12.2f} {:>12.2f}\n", backend, group->size(),
               bytes, settings.fresh ? "fresh" : "hot", median, p10, p90, algorithm, bus);
    std::fflush(stdout);
    records.push_back({{"backend", backend},
                       {"ranks", group->size()},
                       {"bytes", bytes},
                       {"fresh", settings.fresh},
                       {"allocated", !settings.plain},
                       {"iterations", times.size()},
                       {"median_us", median},
                       {"p10_us", p10},
                       {"p90_us", p90},
                       {"algorithm_gb_per_s", algorithm},
                       {"bus_gb_per_s", bus}});
  }
  parallel::destroy_process_group();
}

// All backends in turn, as one rank. Threads are ranks of rank 0's process, while the other processes wait.
nlohmann::json measure_all(int rank, int ranks, const Settings& settings) {
  nlohmann::json records = nlohmann::json::array();
  if (rank == 0)
    fmt::print("{:>8} {:>5} {:>10} {:>6} {:>12} {:>10} {:>10} {:>12} {:>12}\n", "backend", "ranks", "bytes", "data",
               "median (us)", "p10 (us)", "p90 (us)", "algbw (GB/s)", "busbw (GB/s)");
  for (const std::string& backend : settings.backends) {
    if (backend != "thread") {
      measure_backend(backend, settings, records);
    } else if (rank == 0) {
      parallel::spawn_threads(
          [&](int thread, int) {
            nlohmann::json others;
            measure_backend(backend, settings, thread == 0 ? records : others);
          },
          {.nthreads = ranks});
    }
  }
  return records;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  std::string json_file;
  bench::Options options(
      "Times all_reduce of one float32 tensor, in memory that the group allocates, over the ranks that tandem-run or "
      "mpirun has started, or over -n processes of its own. A time is that of the slowest rank. algbw = bytes / time, "
      "busbw = "
      "algbw * 2 (n-1) / n.");
  options.number("-n", &settings.ranks, "ranks, unless a launcher has started them", 1);
  options.word("--backend", &settings.backends, "shm, thread, gloo, mpi; a comma-separated list",
               {"shm", "thread", "gloo", "mpi"});
  options.number("--bytes", &settings.bytes, "sizes of the tensor, a comma-separated list", 4, std::int64_t{1} << 40);
  options.flag("--fresh,!--hot", &settings.fresh,
               "each rank writes its data anew before each call (default), or leaves the last result there");
  options.flag("--plain", &settings.plain, "tensors in ordinary memory, which the ranks do not share");
  options.number("--iterations", &settings.iterations, "calls that are timed (default: by size, 20 to 2000)", 1);
  options.word("--json", &json_file, "write the records to this file");
  if (const std::optional<int> code = options.parse(argc, argv)) return *code;

  bool written = true;
  auto run = [&](int rank, int ranks) {
    const nlohmann::json records = measure_all(rank, ranks, settings);
    if (rank == 0 && !json_file.empty()) written = bench::write_json(json_file, records.dump(1));
    check(written, "all_reduce", "the records were not saved");
  };
  try {
    if (!parallel::is_launched()) return parallel::spawn(run, {.nprocs = settings.ranks});
    const parallel::StartEnvironment start = parallel::start_environment();
    run(start.rank.value().value, start.world_size.value().value);
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
