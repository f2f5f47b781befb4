// Nodes: what the launchers of a job's hosts tell each other, through the store that the launcher of node 0 holds.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include <tandem/parallel/launch/node_messages.h>
#include <tandem/parallel/launch/rank_environment.h>
#include <tandem/tensor/callable.h>

namespace tandem::parallel {

/// A name for a job, which keeps it in all its starts; that of node 0 holds.
std::string random_run_id();

/// One start of a job, as its launchers see it. A thread of its own talks to the store; no function here waits for it,
/// but for the constructor. For one node there is neither: it remembers the first failure.
class Nodes {
 public:
  /// Waits until all launchers have come. CommError names those that do not; Error when they were given different
  /// options. `stop` is asked now and then; once it is true, `joined` is false and nothing else may be called.
  Nodes(const LaunchOptions& options, const std::string& secret, const std::string& run_id, int restart,
        FunctionRef<bool()> stop);
  ~Nodes();
  Nodes(const Nodes&) = delete;
  Nodes& operator=(const Nodes&) = delete;
  bool joined() const;
  const Layout& layout() const;
  /// " on host a", and with several nodes which one.
  std::string here() const;

  /// A rank of this node has ended: the others' calls learn of it, after what was reported before. For several nodes.
  void report_end(int rank, const std::string& text);
  /// The first one, on whichever node, is what `failure` tells.
  void report_failure(const Failure& failure);
  std::optional<Failure> failure() const;
  /// All ranks of this node have ended.
  void report_done();
  /// Whether all nodes that are left have agreed that this start is over. Then `restart` says whether another follows.
  bool settled() const;
  bool restart() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem::parallel
