// RankProcess: one rank of a job as a process, in a process group of its own.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include <signal.h>
#include <sys/types.h>

namespace tandem::parallel {

/// "signal 9 (Killed)".
std::string signal_name(int signal);

/// How a process has ended.
struct ProcessEnd {
  bool by_signal = false;
  int number = 0;     // the signal, or the exit code
  bool known = true;  // not where another part of the program has waited for the process
  bool good() const { return !by_signal && number == 0; }
  int exit_code() const { return by_signal ? 128 + number : number; }
  /// "was killed by signal 9 (Killed)", or "ended with exit code 3".
  std::string text() const;
};

/// What a rank's process is started with.
struct RankProcessOptions {
  int rank = 0;
  const std::vector<std::string>* command = nullptr;
  std::vector<std::string> environment = {};  // NAME=value
  int output = -1;                            // what becomes standard output and error; -1: the launcher's
  int kept = -1;                              // a descriptor that the rank gets as it is; all others are closed
};

/// A process that is started at construction, and killed with all of its group at destruction.
class RankProcess {
 public:
  /// Error when the system can start no process. A program that cannot be executed says so and ends with 127. The
  /// process is killed when the calling thread ends; it reads nothing from standard input.
  explicit RankProcess(const RankProcessOptions& options);
  ~RankProcess();
  RankProcess(RankProcess&& other) noexcept;
  RankProcess& operator=(RankProcess&&) = delete;
  pid_t pid() const { return pid_; }
  /// Becomes readable when the process ends; -1 where the system has no such thing.
  int descriptor() const { return descriptor_; }
  /// To the process, or to all of its group.
  void send(int signal) const;
  void send_to_group(int signal) const;
  /// How it has ended, or nothing while it runs. Its number stays taken until `reap`.
  std::optional<ProcessEnd> ended() const;
  /// After the end: kills what it has left in its group, and frees its number.
  void reap();

 private:
  bool look(siginfo_t& info, int options) const;

  pid_t pid_ = -1;
  int descriptor_ = -1;
};

}  // namespace tandem::parallel
