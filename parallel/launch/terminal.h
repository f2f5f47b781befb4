// Terminal: the launcher's standard output and error. Threads of its own write them, so that a reader that has paused
// holds up neither the ends of ranks nor signals.
#pragma once
#include <memory>
#include <string>
#include <string_view>

namespace tandem::parallel {

/// No function waits for a reader, but for a moment that keeps lines and sentences in order. What cannot be written is
/// said once, and ends no rank.
class Terminal {
 public:
  Terminal();
  /// Waits for the reader, for 3 s at most.
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;
  /// A line of a rank on standard output; `flush` hands all of them over.
  void write_line(int rank, std::string_view line);
  void flush();
  /// A sentence of the launcher on standard error, whether or not it can be written.
  void say(std::string_view text);
  /// Says that output is lost.
  void fail(std::string_view text);
  bool failed() const { return failed_; }
  /// Whether so much waits for the reader that no more should be taken from ranks.
  bool full() const;
  /// Waits until nothing is left to be written, or the time has passed; false then.
  bool drain(int milliseconds);

 private:
  class Stream;
  void look();

  std::shared_ptr<Stream> output_, errors_;
  std::string lines_;
  bool failed_ = false, said_ = false;
};

}  // namespace tandem::parallel
