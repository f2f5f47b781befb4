// The output of ranks: whole lines for the terminal, a log for each rank, and the last lines.
#pragma once
#include <cstdio>
#include <deque>
#include <string>
#include <string_view>

#include <tandem/parallel/launch/terminal.h>

namespace tandem::parallel {

/// Where the lines of a rank go.
struct RankOutputOptions {
  int rank = 0;
  std::string log = {};  // a file; empty: to the terminal alone
  bool tee = false;      // to the terminal as well as to the log
};

/// Makes the folder for the logs of the job's `restart`-th start. Returns "" when it cannot be made, which it says.
std::string make_log_folder(const std::string& folder, int restart, Terminal& terminal);

/// The output of one rank, read from a pipe.
class RankOutput {
 public:
  /// `pipe` is closed by this object; -1: the rank writes elsewhere.
  RankOutput(int pipe, const RankOutputOptions& options, Terminal& terminal);
  ~RankOutput();
  RankOutput(RankOutput&& other) noexcept;
  RankOutput& operator=(RankOutput&&) = delete;
  /// The pipe, for poll; -1 once it has ended.
  int pipe() const { return pipe_; }
  /// Takes what is there; waits when there is nothing.
  void take();
  /// Takes what is there and closes the pipe, whoever else may still hold it open.
  void finish();
  const std::deque<std::string>& last_lines() const { return last_lines_; }

 private:
  void write_line(std::string_view line);
  void flush();
  void end();

  int pipe_;
  RankOutputOptions options_;
  Terminal& terminal_;
  std::FILE* log_ = nullptr;
  std::string line_;  // not yet whole
  std::deque<std::string> last_lines_;
};

}  // namespace tandem::parallel
