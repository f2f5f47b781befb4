// Mesh: messages between the members of a group over a network, with deadlines. What Gloo and MPI are used for.
#pragma once
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include <tandem/parallel/comm/backends.h>
#include <tandem/tensor/callable.h>

namespace tandem::parallel {

/// Bytes to or from a member.
struct Transfer {
  int peer = 0;  // its rank in the group
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// What went wrong in an exchange: the members whose transfers did not end, and the transport's words.
struct ExchangeError {
  std::vector<int> peers;
  bool late = false;  // the deadline has passed
  // A failure ends all connections, and so all that goes on in other threads. These throw the error of the exchange
  // that failed first, as an echo: only that one may look for the reason, and the others wait for what it finds.
  bool echo = false;
  std::string text;
};

/// A connection between each two members. After an ExchangeError it is of no more use.
class Mesh {
 public:
  virtual ~Mesh() = default;
  /// Sends and receives, and returns when all is done. Transfers meet those of the same `lane` on the other side, in
  /// their order; those of no bytes are left out. Several threads may exchange at once, each on lanes of its own.
  /// Throws ExchangeError after `seconds`, or when a connection has ended.
  virtual void exchange(int lane, const std::vector<Transfer>& sends, const std::vector<Transfer>& receives,
                        double seconds) = 0;
  /// From another thread: exchanges that are under way, and every later one, fail at once.
  virtual void abandon() = 0;
  /// Ends all connections, so that the others notice.
  virtual void close() = 0;
};

/// Connects all members; `rank` is this process's in the group. CommError names one that does not come.
using MeshMaker = std::unique_ptr<Mesh>(const GroupSetup& setup, int rank);
/// Over Gloo's TCP transport.
std::unique_ptr<Mesh> make_gloo_mesh(const GroupSetup& setup, int rank);

/// A group over a mesh. Processes that are no members make no mesh.
std::shared_ptr<ProcessGroup> make_mesh_group(const GroupSetup& setup, const std::string& backend,
                                              FunctionRef<MeshMaker> make_mesh);

/// Keeps SIGPIPE from the calling thread: transports may write to connections without asking that a closed one be an
/// error alone. Threads started meanwhile keep it off, too.
class NoBrokenPipeSignal {
 public:
  NoBrokenPipeSignal();
  ~NoBrokenPipeSignal();
  NoBrokenPipeSignal(const NoBrokenPipeSignal&) = delete;
  NoBrokenPipeSignal& operator=(const NoBrokenPipeSignal&) = delete;

 private:
  sigset_t before_;
};

}  // namespace tandem::parallel
