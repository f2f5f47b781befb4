#include <tandem/parallel/launch/spawn.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include <tandem/parallel/comm/start_environment.h>
#include <tandem/parallel/launch/launch_control.h>
#include <tandem/parallel/launch/launcher.h>
#include <tandem/tensor/error.h>

namespace tandem::parallel {
namespace {

std::vector<std::string> own_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::string> command{std::filesystem::read_symlink("/proc/self/exe").string()};
  std::istringstream parts(text);
  std::string part;
  for (bool first = true; std::getline(parts, part, '\0'); first = false)
    if (!first) command.push_back(part);
  return command;
}

bool in_child = false;  // inside the function of a call of spawn

// The child's whole life: it never returns to main.
[[noreturn]] void run_child(FunctionRef<void(int, int)> function, int nprocs) {
  const int rank = std::atoi(std::getenv("RANK"));
  int code = 0;
  in_child = true;
  unsetenv(kSpawnCallVariable);  // it is not for programs that this one starts
  rank_begins();
  try {
    function(rank, nprocs);
  } catch (const std::exception& e) {
    const std::string_view text = e.what();
    const std::string who = text.starts_with("rank ") ? "" : fmt::format("rank {} of {}: ", rank, nprocs);
    std::fputs(fmt::format("{}{}\n", who, text).c_str(), stderr);
    code = 1;
  } catch (...) {
    std::fputs(fmt::format("rank {} of {}: ended by an exception that is no std::exception\n", rank, nprocs).c_str(),
               stderr);
    code = 1;
  }
  std::fflush(nullptr);
  std::_Exit(code);
}

}  // namespace

struct SpawnHandle::State {
  // By its own thread, since processes end with the thread that has started them.
  void run(LaunchOptions options) {
    options.control = &control;
    thread = std::thread([this, options] {
      try {
        finish(launch(own_command(), options), nullptr);
      } catch (...) {
        finish(1, std::current_exception());
      }
    });
    control.wait_until_started();
  }
  void finish(int code, std::exception_ptr what) {
    {
      const std::lock_guard lock(mutex);
      result = code;
      error = std::move(what);
      control.set_pids({});
    }
    ended.notify_all();
  }
  ~State() {
    control.kill();
    if (thread.joinable()) thread.join();
  }

  LaunchControl control;
  mutable std::mutex mutex;
  std::condition_variable ended;
  std::optional<int> result;
  std::exception_ptr error;
  std::thread thread;
};

SpawnHandle::State& SpawnHandle::state() const {
  check(state_ != nullptr, "SpawnHandle", "this handle was moved to another one, which has the processes");
  return *state_;
}

SpawnHandle::SpawnHandle(std::unique_ptr<State> state) : state_(std::move(state)) {}
SpawnHandle::SpawnHandle(SpawnHandle&& other) noexcept = default;
SpawnHandle& SpawnHandle::operator=(SpawnHandle&& other) noexcept = default;
SpawnHandle::~SpawnHandle() = default;

int SpawnHandle::wait() {
  State& s = state();
  std::unique_lock lock(s.mutex);
  s.ended.wait(lock, [&] { return s.result.has_value(); });
  if (s.error) std::rethrow_exception(s.error);
  return *s.result;
}

bool SpawnHandle::wait(double seconds) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  return s.ended.wait_for(lock, std::chrono::duration<double>(std::min(seconds, 1e9)),
                          [&] { return s.result.has_value(); });
}

bool SpawnHandle::running() const {
  const State& s = state();
  const std::lock_guard lock(s.mutex);
  return !s.result;
}

std::vector<int> SpawnHandle::pids() const { return state().control.pids(); }
void SpawnHandle::kill() { state().control.kill(); }

SpawnHandle spawn(FunctionRef<void(int, int)> function, SpawnOptions options, const char* file, int line) {
  check(options.nprocs >= 1, "spawn", "{} processes were asked for; give at least 1", options.nprocs);
  check(!in_child, "spawn", "was called by a process that spawn started; start all processes in one call");
  const char* wanted = std::getenv(kSpawnCallVariable);
  static const std::thread::id first_caller = std::this_thread::get_id();
  check(wanted != nullptr || first_caller == std::this_thread::get_id(), "spawn",
        "was called by a second thread; call it from one thread, since a process finds its call by counting calls");
  static std::atomic<int> calls = 0;
  const std::string call = fmt::format("{}:{}:{}", ++calls, file, line);
  auto state = std::make_unique<SpawnHandle::State>();
  if (wanted != nullptr) {
    if (call == wanted) run_child(function, options.nprocs);
    state->result = 0;  // an earlier call of the program that started this process
    return SpawnHandle(std::move(state));
  }
  const LaunchOptions launch_options{.nprocs = options.nprocs,
                                     .prefix_output = false,
                                     .forward_signals = options.join,
                                     .must_begin = fmt::format("the call of spawn at {}:{}", file, line),
                                     .environment = {{kSpawnCallVariable, call}}};
  if (options.join) {
    state->result = launch(own_command(), launch_options);
  } else {
    state->run(launch_options);
    const std::lock_guard lock(state->mutex);
    if (state->error) std::rethrow_exception(state->error);
  }
  return SpawnHandle(std::move(state));
}

}  // namespace tandem::parallel
