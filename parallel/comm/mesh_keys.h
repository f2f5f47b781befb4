// What the members of a group over a mesh keep in the store, and look for there. All of it is inline, since the module
// of the backend mpi takes nothing from the library.
#pragma once
#include <string>
#include <vector>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/comm/store_limits.h>
#include <tandem/parallel/comm/store_silence.h>

namespace tandem::parallel {

/// Why the group is broken (see Reason), once any member has found that.
inline std::string lost_key(const GroupSetup& setup) { return setup.name + "/lost"; }

/// Whether there is no use in waiting for a member: it has ended, or the group is broken.
inline bool is_lost(const GroupSetup& setup, int member) {
  const int in_job = setup.ranks[static_cast<std::size_t>(member)];
  try {
    return setup.store->check(lost_key(setup)) || setup.store->check(ended_key(in_job));
  } catch (const SilentStore&) {
    return false;  // the deadline will tell
  } catch (const CommError& e) {
    return e.rank() == in_job;  // which held the store
  } catch (const Error&) {
    return false;
  }
}

/// Each member calls it when it has no more need of keys of the group; the last one removes them.
inline void done_with_keys(const GroupSetup& setup, const std::vector<std::string>& keys) {
  const std::string count = setup.name + "/done";
  if (setup.store->add(count, 1) < static_cast<std::int64_t>(setup.ranks.size())) return;
  for (const std::string& key : keys) setup.store->remove(key);
  setup.store->remove(count);
}

}  // namespace tandem::parallel
