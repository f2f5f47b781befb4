#include <tandem/parallel/launch/guardian.h>

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>

#include <tandem/tensor/error.h>

namespace tandem::parallel {
namespace {

// Lines "+ 123" and "- 123" come on standard input.
constexpr const char* kScript = R"(trap '' HUP INT QUIT TERM USR1 USR2
while read -r change group; do
  case $change in
    +) groups="$groups $group"; eval "runs_$group=1";;
    -) unset "runs_$group";;
  esac
done
for group in $groups; do
  eval "runs=\${runs_$group-}"
  [ -z "$runs" ] || kill -9 "-$group"
  unset "runs_$group"
done)";

// A shell, since a copy of this process would keep the memory that a large program writes anew.
int start_shell(pid_t* pid, int socket) {
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, socket, STDIN_FILENO);
  // Nobody waits for the end of the launcher's output because of this process.
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&files, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t all;
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &all);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK);
  const char* arguments[] = {"sh", "-c", kScript, "tandem-guardian", nullptr};
  char* no_variables[] = {nullptr};
  const int error = posix_spawn(pid, "/bin/sh", &files, &attributes, const_cast<char**>(arguments), no_variables);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  return error;
}

// Called between fork and exec as well.
void tell(int socket, char change, pid_t group) {
  char line[32] = {change, ' '};
  char* end = std::to_chars(line + 2, line + sizeof line - 1, group).ptr;
  *end++ = '\n';
  (void)!send(socket, line, static_cast<std::size_t>(end - line), MSG_NOSIGNAL);
}

}  // namespace

Guardian::Guardian() {
  int ends[2] = {-1, -1};
  const bool made = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0;
  check(made, "launch", "a socket cannot be made: {}; see `ulimit -n`", std::strerror(errno));
  const int error = start_shell(&pid_, ends[1]);
  close(ends[1]);
  socket_ = ends[0];
  if (error == 0) {
    descriptor_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
    return;
  }
  close(socket_);
  fail("launch", "/bin/sh, which ends what a killed launcher leaves behind, cannot be started: {}",
       std::strerror(error));
}

Guardian::~Guardian() {
  close(socket_);
  siginfo_t info{};
  const bool known = descriptor_ >= 0;
  while (waitid(known ? P_PIDFD : P_PID, static_cast<id_t>(known ? descriptor_ : pid_), &info, WEXITED) != 0 &&
         errno == EINTR) {
  }
  if (known) close(descriptor_);
}

void Guardian::group_started(int socket, pid_t group) { tell(socket, '+', group); }
void Guardian::group_ended(int socket, pid_t group) { tell(socket, '-', group); }

}  // namespace tandem::parallel
