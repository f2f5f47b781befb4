#include <tandem/parallel/launch/guardian.h>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <tandem/tensor/error.h>

namespace tandem::parallel {
namespace {

// A line on standard input says that the launcher has done its work; the end of the file, that it was killed.
constexpr const char* kScript = R"(trap '' HUP INT QUIT TERM USR1 USR2
read -r line && exit
PATH=/usr/local/bin:/usr/bin:/bin
for round in 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9; do
  found=$(cd /proc && grep -lzxF -e "$1" [0-9]*/environ)
  [ -n "$found" ] || exit
  for file in $found; do kill -9 "${file%/environ}"; done
  sleep 0.05
done)";

// A shell, since a copy of this process would keep the memory that a large program writes anew.
int start_shell(pid_t* pid, int socket, const std::string& entry) {
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
  const char* arguments[] = {"sh", "-c", kScript, "tandem-guardian", entry.c_str(), nullptr};
  char* no_variables[] = {nullptr};
  const int error = posix_spawn(pid, "/bin/sh", &files, &attributes, const_cast<char**>(arguments), no_variables);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  return error;
}

}  // namespace

Guardian::Guardian(const std::string& entry) {
  int ends[2] = {-1, -1};
  const bool made = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0;
  check(made, "launch", "a socket cannot be made: {}; see `ulimit -n`", std::strerror(errno));
  const int error = start_shell(&pid_, ends[1], entry);
  close(ends[1]);
  socket_ = ends[0];
  if (error == 0) return;
  close(socket_);
  fail("launch", "/bin/sh, which ends what a killed launcher leaves behind, cannot be started: {}",
       std::strerror(error));
}

Guardian::~Guardian() {
  (void)!send(socket_, "\n", 1, MSG_NOSIGNAL);
  close(socket_);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

bool Guardian::alive() const {
  pollfd end{socket_, 0, 0};
  return poll(&end, 1, 0) == 0;
}

}  // namespace tandem::parallel
