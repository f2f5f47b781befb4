#include <tandem/parallel/launch/guardian.h>

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>

#include <tandem/tensor/error.h>

namespace tandem::parallel {
namespace {

// The process's whole life. The program may have had threads when it was forked, so it makes async-signal-safe calls
// alone.
[[noreturn]] void guard(int socket) {
  setsid();
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  prctl(PR_SET_NAME, "tandem-guardian");
  if (socket != 0) dup2(socket, 0);
  close_range(1, UINT_MAX, 0);  // so that nobody waits for the end of the launcher's output because of this process
  pid_t groups[kMaxRanksPerNode];
  int count = 0;
  for (pid_t message = 0;;) {
    const ssize_t n = recv(0, &message, sizeof message, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n != sizeof message) break;
    if (message > 0 && count < kMaxRanksPerNode) groups[count++] = message;
    for (int i = 0; i < count; ++i)
      if (groups[i] == -message) groups[i--] = groups[--count];
  }
  for (int i = 0; i < count; ++i) kill(-groups[i], SIGKILL);
  _exit(0);
}

void tell(int socket, pid_t message) { (void)!send(socket, &message, sizeof message, MSG_NOSIGNAL); }

}  // namespace

Guardian::Guardian() {
  int ends[2] = {-1, -1};
  const bool made = socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0;
  check(made, "launch", "a socket cannot be made: {}; see `ulimit -n`", std::strerror(errno));
  pid_ = fork();
  if (pid_ == 0) guard(ends[1]);
  const int error = errno;
  close(ends[1]);
  socket_ = ends[0];
  if (pid_ > 0) return;
  close(socket_);
  fail("launch", "no process can be started: {}", std::strerror(error));
}

Guardian::~Guardian() {
  close(socket_);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Guardian::group_started(int socket, pid_t group) { tell(socket, group); }
void Guardian::group_ended(int socket, pid_t group) { tell(socket, -group); }

}  // namespace tandem::parallel
