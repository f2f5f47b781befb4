// tandem-run: starts a program once for each rank.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <tandem/parallel/launch/launcher.h>
#include <tandem/tensor/device.h>
#include <tandem/tensor/error.h>
#include <tandem/tensor/threads.h>

namespace {

using tandem::check;

constexpr const char* kDescription =
    "Starts PROGRAM once for each rank of a job, watches the processes, and ends all when one fails.\n"
    "Each finds its place in the variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and others, as "
    "under\n"
    "torchrun. The cores are divided between the ranks by OMP_NUM_THREADS, unless it is set.";
constexpr const char* kFooter =
    "\nWhat follows PROGRAM belongs to it. Examples:\n"
    "  tandem-run -n 2 examples/fashion_mnist --parallel ddp --epochs 1\n"
    "  tandem-run -n gpu --max-restarts 3 --log-dir logs ./train\n"
    "  tandem-run -n 4 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 ./train\n"
    "  (on the second host: --node-rank 1; on both TANDEM_SECRET_FILE names a file with the same secret)\n";

struct Help final : CLI::Formatter {
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: tandem-run [OPTIONS] PROGRAM [ARGUMENTS...]\n";
  }
};

int count_of_ranks(const std::string& text) {
  if (text == "cpu") return tandem::available_cores();
  if (text == "gpu") {
    const int count = tandem::cuda::device_count();
    check(count > 0, "tandem-run", "-n gpu starts one process a GPU, and there is none here; give a number, or cpu");
    return count;
  }
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  check(error == std::errc() && end == text.data() + text.size() && count > 0, "tandem-run",
        "-n is '{}'; it must be a number of processes from 1 up, cpu (one a core), or gpu (one a GPU)", text);
  return count;
}

int print(const std::string& text) {
  const bool written = std::fputs(text.c_str(), stdout) >= 0 && std::fflush(stdout) == 0;
  if (!written) fmt::print(stderr, "tandem-run: the output cannot be written: {}\n", std::strerror(errno));
  return written ? 0 : 1;
}

int run(int argc, char** argv) {
  CLI::App app{kDescription, "tandem-run"};
  tandem::parallel::LaunchOptions options{.announce = true, .forward_signals = true};
  std::string nprocs = "1";
  bool dry_run = false;
  app.formatter(std::make_shared<Help>());
  app.footer(kFooter);
  app.prefix_command();
  app.option_defaults()->always_capture_default();
  app.add_option("-n,--nproc-per-node", nprocs,
                 "Processes on this host: a number, cpu (one a core) or gpu (one a GPU)");
  app.add_option("--nnodes", options.nnodes, "Hosts; on each tandem-run is started with the same options");
  app.add_option("--node-rank", options.node_rank, "Which of them this is; 0 holds the store");
  app.add_option("--master-addr", options.master_addr,
                 "Address of node 0 that the others reach (default: 127.0.0.1 for one host, needed for several)")
      ->capture_default_str();
  app.add_option("--master-port", options.master_port,
                 "Port of the store on node 0; 0: given by the system, for one host");
  app.add_option("--max-restarts", options.max_restarts, "How often all ranks are started again when one has failed");
  const CLI::Option* log_dir =
      app.add_option("--log-dir", options.log_dir,
                     "Folder for each rank's output: rank-0.log and so on (default: output goes to the terminal)");
  app.add_flag("--tee", options.tee, "With --log-dir: output goes to the terminal as well (default: off)");
  app.add_option("--timeout", options.timeout_seconds,
                 "Seconds that ranks wait for a silent rank, and hosts for each other; 0: TANDEM_TIMEOUT, or 30");
  app.add_flag("--dry-run", dry_run, "Print each rank's variables and command, and start nothing (default: off)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& e) {
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    fmt::print(stderr, "tandem-run: {}\ntandem-run --help lists the options\n", e.what());
    return 2;
  }
  std::vector<std::string> command = app.remaining();
  const bool marked = !command.empty() && command[0] == "--";
  if (marked) command.erase(command.begin());
  try {
    check(!command.empty(), "tandem-run", "there is no program to start");
    check(marked || !command[0].starts_with("-"), "tandem-run",
          "there is no option {}; the program comes after the options", command[0]);
    options.nprocs = count_of_ranks(nprocs);
    check(log_dir->count() == 0 || !options.log_dir.empty(), "tandem-run", "--log-dir is empty; give a folder");
    const std::string description = tandem::parallel::describe_launch(command, options);  // checks the options
    if (dry_run) return print(description);
  } catch (const tandem::Error& e) {
    fmt::print(stderr, "{}\ntandem-run --help lists the options\n", e.what());
    return 2;
  }
  return tandem::parallel::launch(command, options);
}

}  // namespace

int main(int argc, char** argv) {
  // Standard streams that are closed stay unusable, instead of becoming whatever is opened next.
  for (int fd = 0; fd <= STDERR_FILENO; ++fd)
    if (fcntl(fd, F_GETFD) < 0) open("/dev/null", O_RDONLY);
  signal(SIGCHLD, SIG_DFL);  // some that start programs ignore it, and then nobody learns how a process has ended
  try {
    return run(argc, argv);
  } catch (const tandem::Error& e) {
    fmt::print(stderr, "tandem: {}\n", e.what());
    return 1;
  }
}
