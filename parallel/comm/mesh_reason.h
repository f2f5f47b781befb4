// Who is to blame when a group over a mesh has broken: the members find one answer through the store.
#pragma once
#include <string>
#include <vector>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/comm/mesh.h>

namespace tandem::parallel {

/// The members to blame, and how they ended; without the latter they are silent. As text in the store.
struct Reason {
  std::vector<int> ranks = {};
  std::string how = {};

  std::string to_text() const;
  /// What is no member of the group is left out.
  static Reason from_text(const GroupSetup& setup, const std::string& text);
};

/// Makes it the group's unless there is one; returns the one that is there.
Reason publish(const GroupSetup& setup, const Reason& reason);

/// What the member `rank` throws for an exchange that failed in `call`. Takes at most 1.5 s, or 2.5 s on several hosts,
/// whatever the store does; the others get to know the answer meanwhile.
CommError explain(const GroupSetup& setup, int rank, const ExchangeError& error, const Fingerprint& call);

}  // namespace tandem::parallel
