// HostGroups: large collectives of a group over several hosts go through shared memory inside a host, and through the
// mesh between one leader a host.
#pragma once
#include <memory>
#include <mutex>
#include <vector>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/comm/mesh.h>
#include <tandem/parallel/comm/mesh_team.h>

namespace tandem::parallel {

/// How the members of a group lie on hosts.
struct HostPlan {
  std::vector<std::vector<int>> hosts = {};  // the members on each, in the order of their first
  bool worth_it = false;                     // several hosts, and several members on one of them
  // Combining inside each host and then between hosts is combining in the one tree over all members.
  bool in_tree = false;
};
/// `hosts` has for each member the host's number, as in GroupSetup.
HostPlan plan_hosts(const std::vector<int>& hosts);

/// Used by one thread, but for abandon.
class HostGroups {
 public:
  HostGroups(const GroupSetup& setup, Mesh& mesh, int rank);
  /// Whether a collective, the same on all members, is to be run here. The first time the groups inside the hosts are
  /// made; where a host has no memory for one, nothing is served from then on. A member that alone cannot map the
  /// memory of its host is missing for the others, who wait for the timeout. Throws ExchangeError.
  bool serves(const Collective& c);
  /// Throws ExchangeError.
  void run(const Collective& c);
  /// Leaves the group inside the host at once; what is under way fails.
  void abandon();

 private:
  bool connect();
  // A lost peer becomes an ExchangeError.
  template <class Body>
  void attempt(const Body& body);
  // Waits for the Work that body(group inside the host) starts, unless this member is alone there.
  template <class Body>
  void inside(const Body& body);

  const GroupSetup& setup_;
  Mesh& mesh_;
  const int rank_;
  const HostPlan plan_;
  std::vector<int> members_;  // of this host
  enum class State { not_tried, connected, refused } state_ = State::not_tried;
  std::mutex mutex_;
  std::shared_ptr<ProcessGroup> inner_;  // reset by abandon
  bool abandoned_ = false;
};

}  // namespace tandem::parallel
