// The connections of a Gloo group: messages between its members, with deadlines.
#pragma once
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include <tandem/parallel/comm/backends.h>

namespace tandem::parallel {

/// Bytes to or from a member.
struct Transfer {
  int peer = 0;  // its rank in the group
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// What went wrong in an exchange: the members whose transfers did not end, and Gloo's words.
struct ExchangeError {
  std::vector<int> peers;
  bool late = false;  // the deadline has passed
  std::string text;
};

/// Keeps SIGPIPE from the calling thread: Gloo writes to connections without asking that a closed one be an error
/// alone. Threads started meanwhile keep it off, too.
class NoBrokenPipeSignal {
 public:
  NoBrokenPipeSignal();
  ~NoBrokenPipeSignal();
  NoBrokenPipeSignal(const NoBrokenPipeSignal&) = delete;
  NoBrokenPipeSignal& operator=(const NoBrokenPipeSignal&) = delete;

 private:
  sigset_t before_;
};

/// A connection between each two members. After an ExchangeError it is of no more use.
class GlooMesh {
 public:
  /// Connects all members; `rank` is this process's in the group. CommError names one that does not come.
  GlooMesh(const GroupSetup& setup, int rank);
  ~GlooMesh();
  GlooMesh(const GlooMesh&) = delete;
  GlooMesh& operator=(const GlooMesh&) = delete;
  /// Sends and receives, and returns when all is done. Every member calls it the same number of times with transfers
  /// that fit; those of no bytes are left out. Throws ExchangeError after `seconds`, or when a connection has ended.
  void exchange(const std::vector<Transfer>& sends, const std::vector<Transfer>& receives, double seconds);
  /// From another thread: an exchange that is under way, and every later one, fails at once.
  void abandon();
  /// Ends all connections, so that the others notice.
  void close();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem::parallel
