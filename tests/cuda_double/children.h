// Parts of the double's tests that run in a process of their own: those that end it, and those that need variables.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace cuda_double_test {

/// Registers a part under a name; its result is the exit status.
struct Child {
  Child(const char* name, int (*body)());
};

struct Outcome {
  int status = 0;    // the exit status, or 128 and the signal
  std::string text;  // what it wrote to stderr
};

/// Runs a part in a new process with more variables, under a time limit of 60 seconds (then it is killed).
Outcome run_child(const std::string& name, const std::vector<std::pair<std::string, std::string>>& variables = {});

/// Starts a part without waiting for it; its stderr is this one's.
int start_child(const std::string& name, const std::vector<std::pair<std::string, std::string>>& variables = {});
/// The exit status of a started part, or 128 and the signal.
int wait_child(int process);

}  // namespace cuda_double_test
