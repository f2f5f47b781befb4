#include <tandem/parallel/launch/launcher.h>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <tandem/parallel/comm/rendezvous.h>
#include <tandem/parallel/comm/store_server.h>
#include <tandem/tensor/error.h>
#include <tandem/tensor/threads.h>

extern char** environ;

namespace tandem::parallel {
namespace {

using Clock = std::chrono::steady_clock;
using Variables = std::vector<std::pair<std::string, std::string>>;

struct Child {
  pid_t pid = -1;  // -1 once it has ended
  int output = -1;
  std::string line;  // output that is not yet a whole line
};

// `job` is what all ranks get.
std::vector<std::string> environment_of(int rank, const LaunchOptions& options, const Variables& job) {
  Variables extra = options.environment;
  extra.insert(extra.end(), job.begin(), job.end());
  const std::string n = std::to_string(options.nprocs), r = std::to_string(rank);
  extra.insert(extra.end(), {{"RANK", r}, {"LOCAL_RANK", r}, {"WORLD_SIZE", n}, {"LOCAL_WORLD_SIZE", n}});
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    const bool replaced =
        std::any_of(extra.begin(), extra.end(), [&](const auto& e) { return text.starts_with(e.first + "="); });
    if (!replaced) result.push_back(text);
  }
  for (const auto& [key, value] : extra) result.push_back(key + "=" + value);
  return result;
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& s : strings) result.push_back(const_cast<char*>(s.c_str()));
  result.push_back(nullptr);
  return result;
}

// To standard error, whether or not it can be written.
void say(const std::string& text) {
  const std::string line = "tandem: " + text + "\n";
  (void)!std::fwrite(line.data(), 1, line.size(), stderr);
}

// For the child between fork and exec.
void write_text(const char* text) { (void)!write(STDERR_FILENO, text, std::strlen(text)); }

Child start(const std::vector<std::string>& command, int rank, const LaunchOptions& options, const Variables& job) {
  int ends[2] = {-1, -1};
  if (options.prefix_output) {
    const bool made = pipe2(ends, O_CLOEXEC) == 0;
    check(made, "launch",
          "a pipe for the output of rank {} cannot be made: {}; start fewer ranks, or raise `ulimit -n`", rank,
          std::strerror(errno));
  }
  const std::vector<std::string> environment = environment_of(rank, options, job);
  const std::vector<char*> arguments = pointers(command), variables = pointers(environment);
  const pid_t launcher = getpid(), pid = fork();
  check(pid >= 0, "launch", "rank {} cannot be started: {}", rank, std::strerror(errno));
  if (pid == 0) {
    // Only async-signal-safe calls from here to exec.
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // no rank outlives its launcher
    if (getppid() != launcher) _exit(1);
    if (ends[1] >= 0) {
      dup2(ends[1], STDOUT_FILENO);
      dup2(ends[1], STDERR_FILENO);
    }
    execvpe(arguments[0], arguments.data(), variables.data());
    write_text("tandem: cannot start ");
    write_text(arguments[0]);
    write_text(errno == ENOENT ? ": no such program\n" : ": it is not an executable file\n");
    _exit(127);
  }
  if (ends[1] >= 0) close(ends[1]);
  return {pid, ends[0], {}};
}

void end_process(Child& child) {
  kill(child.pid, SIGKILL);
  while (waitpid(child.pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  if (child.output >= 0) close(child.output);
}

// Standard output. When it cannot be written, that is said once, and the ranks go on.
class Output {
 public:
  void write_line(int rank, std::string_view line) {
    const std::string text = fmt::format("[{}] {}\n", rank, line);
    if (!failed_ && std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) give_up();
  }
  void flush() {
    if (!failed_ && std::fflush(stdout) != 0) give_up();
  }
  bool failed() const { return failed_; }

 private:
  void give_up() {
    failed_ = true;
    say(fmt::format("the ranks' output cannot be written: {}", std::strerror(errno)));
  }
  bool failed_ = false;
};

void end_output(int rank, Child& child, Output& output) {
  if (!child.line.empty()) output.write_line(rank, child.line);
  output.flush();
  close(child.output);
  child.output = -1;
}

bool readable(int fd) {
  pollfd wait{fd, POLLIN, 0};
  return poll(&wait, 1, 0) > 0;
}

// Prints the whole lines that have come, each behind the rank's number.
void forward_output(int rank, Child& child, Output& output) {
  char buffer[4096];
  const ssize_t n = read(child.output, buffer, sizeof buffer);
  if (n > 0) child.line.append(buffer, static_cast<std::size_t>(n));
  const bool ended = n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN);
  std::size_t begin = 0;
  for (std::size_t end; (end = child.line.find('\n', begin)) != std::string::npos; begin = end + 1)
    output.write_line(rank, std::string_view(child.line).substr(begin, end - begin));
  child.line.erase(0, begin);
  output.flush();
  if (ended) end_output(rank, child, output);
}

std::string describe_end(int status) {
  if (WIFSIGNALED(status))
    return fmt::format("was killed by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)));
  return fmt::format("ended with exit code {}", WEXITSTATUS(status));
}

int exit_code(int status) { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }

}  // namespace

int launch(const std::vector<std::string>& command, const LaunchOptions& options) {
  check(!command.empty(), "launch", "there is no program to start");
  StoreServer store({.launched = true});
  Variables job = {
      {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", std::to_string(store.port())}, {kLauncherStoreVariable, "1"}};
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    const int cores = available_cores(), threads = std::max(1, cores / options.nprocs);
    job.emplace_back("OMP_NUM_THREADS", std::to_string(threads));
    if (options.announce)
      say(fmt::format("{} cores for {} ranks: {} thread{} each (set OMP_NUM_THREADS to change that)", cores,
                      options.nprocs, threads, threads == 1 ? "" : "s"));
  }
  std::fflush(stdout);
  std::vector<Child> children;
  try {
    for (int r = 0; r < options.nprocs; ++r) children.push_back(start(command, r, options, job));
  } catch (...) {
    for (Child& c : children) end_process(c);
    throw;
  }
  store.start();  // after the last fork, so that no rank inherits a connection
  Output output;
  int result = 0, sent = 0;
  Clock::time_point failed{};
  auto open = [](const Child& c) { return c.pid >= 0 || c.output >= 0; };
  while (std::any_of(children.begin(), children.end(), open)) {
    std::vector<pollfd> waits;
    for (const Child& c : children) waits.push_back({c.output, POLLIN, 0});  // poll ignores negative descriptors
    poll(waits.data(), waits.size(), 20);
    for (int r = 0; r < options.nprocs; ++r) {
      Child& child = children[static_cast<std::size_t>(r)];
      if (waits[static_cast<std::size_t>(r)].revents != 0) forward_output(r, child, output);
      int status = 0;
      if (child.pid < 0 || waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
      child.pid = -1;
      // What it has written is in the pipe; a grandchild may hold the other end open for long.
      while (child.output >= 0 && readable(child.output)) forward_output(r, child, output);
      if (child.output >= 0) end_output(r, child, output);
      store.report_end(r, describe_end(status));
      if (status == 0 || result != 0) continue;
      result = exit_code(status);
      failed = Clock::now();
      say(fmt::format("rank {} of {} {}; the other ranks are ended", r, options.nprocs,
                      WIFSIGNALED(status) ? describe_end(status) : fmt::format("failed with exit code {}", result)));
    }
    // The others get 3 s to say what they lost, then are asked to end, then made to.
    const auto since = Clock::now() - failed;
    const int signal = result == 0                       ? 0
                       : since > std::chrono::seconds(6) ? SIGKILL
                       : since > std::chrono::seconds(3) ? SIGTERM
                                                         : 0;
    if (signal == sent) continue;
    for (const Child& c : children)
      if (c.pid >= 0) kill(c.pid, signal);
    sent = signal;
  }
  return result == 0 && output.failed() ? 1 : result;
}

}  // namespace tandem::parallel
