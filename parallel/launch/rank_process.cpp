#include <tandem/parallel/launch/rank_process.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

#include <tandem/tensor/error.h>

namespace tandem::parallel {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& s : strings) result.push_back(const_cast<char*>(s.c_str()));
  result.push_back(nullptr);
  return result;
}

// Whether the program is there, as execvpe looks for it.
bool exists(const std::string& program) {
  if (program.find('/') != std::string::npos) return access(program.c_str(), F_OK) == 0;
  const char* path = std::getenv("PATH");
  std::istringstream folders(path != nullptr ? path : "/bin:/usr/bin");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (access(fmt::format("{}/{}", folder.empty() ? "." : folder, program).c_str(), F_OK) == 0) return true;
  return false;
}

void write_text(const char* text) { (void)!write(STDERR_FILENO, text, std::strlen(text)); }

// The child's life up to the program. Only async-signal-safe calls.
[[noreturn]] void become(const RankProcessOptions& o, char* const* arguments, char* const* variables, pid_t launcher,
                         bool is_there) {
  setpgid(0, 0);
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
  write_text(error == ENOENT && is_there
                 ? ": the interpreter that its first line (#!) or the file itself names is missing"
             : error == ENOENT ? ": no such program"
             : error == EACCES ? ": it is not an executable file"
                               : ": ");
  if (error != ENOENT && error != EACCES) write_text(strerrordesc_np(error));
  write_text("\n");
  _exit(127);
}

}  // namespace

std::string signal_name(int signal) {
  const char* name = sigdescr_np(signal);
  return fmt::format("signal {} ({})", signal, name != nullptr ? name : "real-time");
}

std::string ProcessEnd::text() const {
  if (!known) return "has ended, and another part of the program that started it has taken the news of how";
  return by_signal ? "was killed by " + signal_name(number) : fmt::format("ended with exit code {}", number);
}

RankProcess::RankProcess(const RankProcessOptions& options) {
  const std::vector<char*> arguments = pointers(*options.command), variables = pointers(options.environment);
  const pid_t launcher = getpid();
  const bool is_there = exists(options.command->front());
  pid_ = fork();
  if (pid_ == 0) become(options, arguments.data(), variables.data(), launcher, is_there);
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
    : pid_(std::exchange(other.pid_, -1)), descriptor_(std::exchange(other.descriptor_, -1)) {}

// Looks at the end of the process; false when another part of the program has taken it, or ignores such signals. Then
// the number may be another's, and gets no signal.
bool RankProcess::look(siginfo_t& info, int options) const {
  const bool known = descriptor_ >= 0;
  for (;;) {
    info = {};
    if (waitid(known ? P_PIDFD : P_PID, static_cast<id_t>(known ? descriptor_ : pid_), &info, WEXITED | options) == 0)
      return true;
    if (errno != EINTR) return false;
  }
}

void RankProcess::send(int signal) const {
  siginfo_t info;
  if (pid_ > 0 && look(info, WNOHANG | WNOWAIT)) kill(pid_, signal);
}

void RankProcess::send_to_group(int signal) const {
  siginfo_t info;
  if (pid_ > 0 && look(info, WNOHANG | WNOWAIT)) kill(-pid_, signal);
}

std::optional<ProcessEnd> RankProcess::ended() const {
  siginfo_t info;
  if (!look(info, WNOHANG | WNOWAIT)) return ProcessEnd{.number = 1, .known = false};
  if (info.si_pid == 0) return std::nullopt;
  return ProcessEnd{.by_signal = info.si_code != CLD_EXITED, .number = info.si_status};
}

void RankProcess::reap() {
  if (pid_ < 0) return;
  send_to_group(SIGKILL);
  siginfo_t info;
  look(info, 0);
  if (descriptor_ >= 0) close(descriptor_);
  pid_ = descriptor_ = -1;
}

}  // namespace tandem::parallel
