#include <tandem/parallel/launch/rank_process.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include <tandem/parallel/launch/guardian.h>
#include <tandem/tensor/error.h>

namespace tandem::parallel {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& s : strings) result.push_back(const_cast<char*>(s.c_str()));
  result.push_back(nullptr);
  return result;
}

void write_text(const char* text) { (void)!write(STDERR_FILENO, text, std::strlen(text)); }

// The child's life up to the program. Only async-signal-safe calls.
[[noreturn]] void become(const RankProcessOptions& o, char* const* arguments, char* const* variables, pid_t launcher) {
  setpgid(0, 0);
  Guardian::group_started(o.guardian, getpid());
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(1);
  // A process in the background that reads from the terminal would be stopped.
  const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (nothing >= 0) dup2(nothing, STDIN_FILENO);
  if (o.output >= 0) {
    dup2(o.output, STDOUT_FILENO);
    dup2(o.output, STDERR_FILENO);
  }
  // A thread of the launcher may just have made a socket that a rank must not keep open.
  close_range(STDERR_FILENO + 1, UINT_MAX, CLOSE_RANGE_CLOEXEC);
  if (o.kept >= 0) fcntl(o.kept, F_SETFD, 0);
  execvpe(arguments[0], arguments, variables);
  const int error = errno;
  write_text("tandem: cannot start ");
  write_text(arguments[0]);
  write_text(error == ENOENT ? ": no such program\n" : ": it is not an executable file\n");
  _exit(127);
}

}  // namespace

std::string signal_name(int signal) {
  const char* name = sigdescr_np(signal);
  return fmt::format("signal {} ({})", signal, name != nullptr ? name : "real-time");
}

std::string ProcessEnd::text() const {
  return by_signal ? "was killed by " + signal_name(number) : fmt::format("ended with exit code {}", number);
}

RankProcess::RankProcess(const RankProcessOptions& options) : guardian_(options.guardian) {
  const std::vector<char*> arguments = pointers(*options.command), variables = pointers(options.environment);
  const pid_t launcher = getpid();
  pid_ = fork();
  if (pid_ == 0) become(options, arguments.data(), variables.data(), launcher);
  check(pid_ > 0, "launch", "rank {} cannot be started: {}", options.rank, std::strerror(errno));
  setpgid(pid_, pid_);  // here too, so that signals reach the group from now on
  descriptor_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
}

RankProcess::~RankProcess() {
  if (pid_ < 0) return;
  send_to_group(SIGKILL);
  reap();
}

RankProcess::RankProcess(RankProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      guardian_(other.guardian_) {}

void RankProcess::send(int signal) const {
  if (pid_ > 0) kill(pid_, signal);
}

void RankProcess::send_to_group(int signal) const {
  if (pid_ > 0) kill(-pid_, signal);
}

std::optional<ProcessEnd> RankProcess::ended() const {
  siginfo_t info{};
  if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0)
    return ProcessEnd{.number = 1};  // the program ignores SIGCHLD, so nobody knows
  if (info.si_pid == 0) return std::nullopt;
  return ProcessEnd{.by_signal = info.si_code != CLD_EXITED, .number = info.si_status};
}

void RankProcess::reap() {
  if (pid_ < 0) return;
  send_to_group(SIGKILL);
  Guardian::group_ended(guardian_, pid_);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  if (descriptor_ >= 0) close(descriptor_);
  pid_ = descriptor_ = -1;
}

}  // namespace tandem::parallel
