// The main function of the double's tests: all of them, or one part (`child NAME`) for another process of them.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>

#include "children.h"

namespace cuda_double_test {
namespace {

std::map<std::string, int (*)()>& children() {
  static std::map<std::string, int (*)()> all;
  return all;
}

int exec_child(const std::string& name, const std::vector<std::pair<std::string, std::string>>& variables, int error) {
  pid_t process = fork();
  if (process != 0) return process;
  if (error >= 0) dup2(error, STDERR_FILENO);
  for (const auto& [key, value] : variables) setenv(key.c_str(), value.c_str(), 1);
  alarm(60);
  execl("/proc/self/exe", "double_test", "child", name.c_str(), nullptr);
  _exit(127);
}

}  // namespace

Child::Child(const char* name, int (*body)()) { children()[name] = body; }

int wait_child(int process) {
  int status = 0;
  waitpid(process, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int start_child(const std::string& name, const std::vector<std::pair<std::string, std::string>>& variables) {
  return exec_child(name, variables, -1);
}

Outcome run_child(const std::string& name, const std::vector<std::pair<std::string, std::string>>& variables) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return {-1, "no pipe"};
  int process = exec_child(name, variables, ends[1]);
  close(ends[1]);
  Outcome outcome;
  char buffer[4096];
  for (ssize_t n = 0; (n = read(ends[0], buffer, sizeof buffer)) > 0;)
    outcome.text.append(buffer, static_cast<size_t>(n));
  close(ends[0]);
  outcome.status = wait_child(process);
  return outcome;
}

}  // namespace cuda_double_test

int main(int argc, char** argv) {
  setenv("TANDEM_CUDA_DOUBLE_DEVICES", "4", 0);
  if (argc == 3 && std::strcmp(argv[1], "child") == 0) {
    auto found = cuda_double_test::children().find(argv[2]);
    // Without a search for leaks: a child leaves its memory to the end of the process.
    _exit(found == cuda_double_test::children().end() ? 126 : found->second());
  }
  return doctest::Context(argc, argv).run();
}
