// The output of ranks: whole lines on the terminal behind the rank's number, a log for each rank, and the last lines.
#pragma once
#include <cstdio>
#include <deque>
#include <string>
#include <string_view>

namespace tandem::parallel {

/// A sentence of the launcher on standard error, whether or not it can be written.
void say(std::string_view text);

/// Standard output, for the lines of all ranks. What cannot be written is said once, and ends no rank.
class Terminal {
 public:
  void write_line(int rank, std::string_view line);
  void flush();
  /// Says that output is lost.
  void fail(std::string_view text);
  bool failed() const { return failed_; }

 private:
  void give_up();
  bool written_ = true, failed_ = false;
};

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
