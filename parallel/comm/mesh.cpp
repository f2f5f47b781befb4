#include <tandem/parallel/comm/mesh.h>

#include <ctime>

namespace tandem::parallel {

NoBrokenPipeSignal::NoBrokenPipeSignal() {
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, &before_);
}

NoBrokenPipeSignal::~NoBrokenPipeSignal() {
  if (sigismember(&before_, SIGPIPE) == 1) return;
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  const timespec now{};
  sigtimedwait(&pipe, nullptr, &now);  // takes one that waits
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

}  // namespace tandem::parallel
