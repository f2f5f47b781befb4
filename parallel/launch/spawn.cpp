#include <tandem/parallel/launch/spawn.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include <tandem/parallel/launch/launcher.h>
#include <tandem/tensor/error.h>

namespace tandem::parallel {
namespace {

constexpr const char* kCallVariable = "TANDEM_SPAWN_CALL";

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
  unsetenv(kCallVariable);  // it is not for programs that this one starts
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

int spawn(FunctionRef<void(int, int)> function, SpawnOptions options, const char* file, int line) {
  check(options.nprocs >= 1, "spawn", "{} processes were asked for; give at least 1", options.nprocs);
  check(!in_child, "spawn", "was called by a process that spawn started; start all processes in one call");
  static int calls = 0;
  const std::string call = fmt::format("{}:{}:{}", ++calls, file, line);
  if (const char* wanted = std::getenv(kCallVariable); wanted != nullptr) {
    if (call == wanted) run_child(function, options.nprocs);
    return 0;  // an earlier call of the program that started this process
  }
  return launch(own_command(),
                {.nprocs = options.nprocs, .prefix_output = false, .environment = {{kCallVariable, call}}});
}

}  // namespace tandem::parallel
