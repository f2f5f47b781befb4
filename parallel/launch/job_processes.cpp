#include <tandem/parallel/launch/job_processes.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>
#include <system_error>
#include <thread>

namespace tandem::parallel {
namespace {

namespace fs = std::filesystem;

constexpr int kRounds = 200;  // for processes that start others, and such as the system cannot end
constexpr auto kPause = std::chrono::milliseconds(10);

bool has_entry(const fs::path& process, const std::string& entry) {
  std::ifstream file(process / "environ", std::ios::binary);  // of other users: cannot be read
  const std::string text = '\0' + std::string(std::istreambuf_iterator<char>(file), {});
  return text.find('\0' + entry + '\0') != std::string::npos;
}

// The descriptor comes before the look, so that the signal cannot reach another process with the same number.
bool kill_if_it_has(const fs::path& process, pid_t pid, const std::string& entry) {
  const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  const bool found = has_entry(process, entry);
  if (found && descriptor >= 0) syscall(SYS_pidfd_send_signal, descriptor, SIGKILL, nullptr, 0);
  if (found && descriptor < 0) kill(pid, SIGKILL);
  if (descriptor >= 0) close(descriptor);
  return found;
}

}  // namespace

void kill_processes_with(const std::string& entry) {
  for (int round = 0; round < kRounds; ++round) {
    bool found = false;
    std::error_code error;
    for (fs::directory_iterator at("/proc", error), end; !error && at != end; at.increment(error)) {
      const std::string name = at->path().filename();
      pid_t pid = 0;
      const auto [last, wrong] = std::from_chars(name.data(), name.data() + name.size(), pid);
      if (wrong == std::errc() && *last == '\0') found = kill_if_it_has(at->path(), pid, entry) || found;
    }
    if (!found) return;
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace tandem::parallel
