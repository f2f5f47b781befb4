// What spawn promises, a case each. Ends with 1 on a fault. usage: spawn_program CASE
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>

#include <tandem/tandem.h>
#include <tandem/tests/parallel/collective_cases.h>

using namespace tandem;

using parallel::SpawnHandle;
using test::require;
using test::require_error;

namespace {

void nothing(int, int) {}
void wait_forever(int, int) {
  for (;;) pause();
}

bool gone(int pid) { return ::kill(pid, 0) != 0; }

int exit_code() {
  const int code = parallel::spawn([](int rank, int) { std::_Exit(rank == 1 ? 6 : 0); }, {.nprocs = 2});
  return code == 6 ? 0 : 1;
}

// The file for which the ranks of `waits` wait, named for the process that has started them.
std::filesystem::path flag(pid_t parent) {
  return std::filesystem::temp_directory_path() / fmt::format("tandem_spawn_{}", parent);
}

int waits() {
  SpawnHandle handle = parallel::spawn(
      [](int, int) {
        while (!std::filesystem::exists(flag(getppid()))) usleep(5'000);
      },
      {.nprocs = 2, .join = false});
  require(handle.running() && handle.pids().size() == 2, "two processes run");
  require(!handle.wait(0.1), "they still do");
  std::ofstream(flag(getpid())).put('.');
  require(handle.wait() == 0 && handle.wait() == 0 && handle.wait(0.0), "they have ended");
  require(!handle.running() && handle.pids().empty(), "none runs");
  std::filesystem::remove(flag(getpid()));
  return 0;
}

int fails() {
  SpawnHandle handle = parallel::spawn([](int, int) { std::_Exit(7); }, {.nprocs = 1, .join = false});
  const int code = handle;
  return code == 7 ? 0 : 1;
}

int kills() {
  SpawnHandle handle = parallel::spawn(wait_forever, {.nprocs = 2, .join = false});
  const std::vector<int> pids = handle.pids();
  require(pids.size() == 2 && !gone(pids[0]) && !gone(pids[1]), "they run");
  handle.kill();
  require(handle.wait() == 137, "they were killed");
  return gone(pids[0]) && gone(pids[1]) ? 0 : 1;
}

int ends_with_the_handle() {
  std::vector<int> pids;
  {
    SpawnHandle first = parallel::spawn(wait_forever, {.nprocs = 2, .join = false});
    SpawnHandle second = std::move(first);
    pids = second.pids();
    require(pids.size() == 2 && !gone(pids[0]) && !gone(pids[1]), "they run");
  }
  return gone(pids[0]) && gone(pids[1]) ? 0 : 1;
}

int several_at_once() {
  SpawnHandle a = parallel::spawn(wait_forever, {.nprocs = 1, .join = false});
  SpawnHandle b = parallel::spawn([](int, int) { std::_Exit(3); }, {.nprocs = 2, .join = false});
  require(parallel::spawn(nothing, {.nprocs = 2}).wait() == 0, "one that is waited for, beside them");
  require(b.wait() == 3 && a.running(), "each has its own end");
  return 0;
}

int outlives_its_thread() {
  std::unique_ptr<SpawnHandle> handle;
  std::thread([&] {
    handle = std::make_unique<SpawnHandle>(parallel::spawn(wait_forever, {.nprocs = 1, .join = false}));
  }).join();
  require(!handle->wait(0.5), "the thread has ended, the process has not");
  return 0;
}

int main_ends_early() {
  if (std::getenv("TANDEM_SPAWN_CALL") != nullptr) return 0;
  return parallel::spawn(nothing, {.nprocs = 2}).wait() == 1 ? 0 : 1;
}

// Another part of the program waits for all children.
int others_wait() {
  std::atomic<bool> over = false;
  std::thread reaper([&] {
    while (!over)
      if (waitpid(-1, nullptr, WNOHANG) <= 0) usleep(100);
  });
  const int code = parallel::spawn([](int, int) { usleep(300'000); }, {.nprocs = 1});
  over = true;
  reaper.join();
  return code == 0 || code == 1 ? 0 : 1;  // 0 where the launcher was first
}

int ignores_children() {
  signal(SIGCHLD, SIG_IGN);
  require_error("this program ignores SIGCHLD", [] { parallel::spawn(nothing, {.nprocs = 1}); });
  return 0;
}

int two_threads() {
  require(parallel::spawn(nothing, {.nprocs = 1}).wait() == 0, "the first thread may");
  std::thread([] {
    require_error("was called by a second thread; call it from one thread",
                  [] { parallel::spawn(nothing, {.nprocs = 1}); });
  }).join();
  return 0;
}

int moved_handles() {
  SpawnHandle first = parallel::spawn(nothing, {.nprocs = 1, .join = false});
  SpawnHandle second = std::move(first);
  require_error("this handle was moved", [&] { (void)first.wait(); });
  require_error("this handle was moved", [&] { (void)first.wait(0.1); });
  require_error("this handle was moved", [&] { (void)first.running(); });
  require_error("this handle was moved", [&] { (void)first.pids(); });
  require_error("this handle was moved", [&] { first.kill(); });
  return second;
}

// Nothing of the launcher takes the place of standard streams.
int closed_streams() {
  for (int fd = 0; fd < 3; ++fd) close(fd);
  return parallel::spawn([](int, int) { std::printf("text\n"); }, {.nprocs = 2});
}

int cannot_start() {
  require_error("0 processes were asked for", [] { parallel::spawn(nothing, {.nprocs = 0}); });
  require_error("0 processes were asked for", [] { parallel::spawn(nothing, {.nprocs = 0, .join = false}); });
  require_error("9999 processes on a host", [] { parallel::spawn(nothing, {.nprocs = 9999}); });
  require_error("9999 processes on a host", [] { parallel::spawn(nothing, {.nprocs = 9999, .join = false}); });
  return 0;
}

// For the test's signals: ranks that say who they are.
void tell(int, int) {
  std::printf("%d\n", getpid());
  std::fflush(stdout);
  wait_forever(0, 0);
}
int waits_for_signals() { return parallel::spawn(tell, {.nprocs = 2}); }
int goes_on_beside() {
  const SpawnHandle handle = parallel::spawn(tell, {.nprocs = 2, .join = false});
  wait_forever(0, 0);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, int (*)()> cases = {{"exit_code", exit_code},
                                                  {"waits", waits},
                                                  {"fails", fails},
                                                  {"kills", kills},
                                                  {"ends_with_the_handle", ends_with_the_handle},
                                                  {"several_at_once", several_at_once},
                                                  {"outlives_its_thread", outlives_its_thread},
                                                  {"main_ends_early", main_ends_early},
                                                  {"others_wait", others_wait},
                                                  {"ignores_children", ignores_children},
                                                  {"two_threads", two_threads},
                                                  {"moved_handles", moved_handles},
                                                  {"closed_streams", closed_streams},
                                                  {"cannot_start", cannot_start},
                                                  {"waits_for_signals", waits_for_signals},
                                                  {"goes_on_beside", goes_on_beside}};
  const auto found = cases.find(argc == 2 ? argv[1] : "");
  return found == cases.end() ? 2 : found->second();
}
