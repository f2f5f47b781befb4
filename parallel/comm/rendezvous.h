// Rendezvous: how a process finds the others of its job, and what they agree on before the first group is made.
#pragma once
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <tandem/parallel/comm/process_group.h>
#include <tandem/parallel/comm/store.h>

namespace tandem::parallel {

class MeetingFile;
class StoreServer;

/// Set by a launcher that holds the store at MASTER_ADDR:MASTER_PORT itself.
inline constexpr const char* kLauncherStoreVariable = "TANDEM_LAUNCHER_STORE";
/// How many times the launcher has started the job again, 0 when it is not set.
inline constexpr const char* kRestartVariable = "RESTART_COUNT";

/// A process's place in its job.
struct Place {
  int rank = 0, world_size = 1;
  std::shared_ptr<StoreServer> server = nullptr;  // in the process that holds the store
  std::shared_ptr<Store> store = nullptr;
  std::string store_host = {};  // empty for a store that has none
  std::shared_ptr<MeetingFile> meeting =
      nullptr;  // on rank 0, where the others find the store by it; until all have come
};
/// Finds the place by the options and the environment, and connects to the store. Error says which setting is missing
/// or wrong; CommError when the store does not come.
Place find_place(const InitOptions& options);

/// What the ranks have agreed on.
struct Agreement {
  std::string prefix;      // for the keys of this joining: a process may leave and join again
  std::vector<int> hosts;  // of each rank, the lowest rank on its host: those with one host can share memory
  bool one_host() const {
    return std::all_of(hosts.begin(), hosts.end(), [](int h) { return h == 0; });
  }
};
/// Waits until all ranks have come. CommError names one that does not, or whose world_size or backend differ; Error in
/// a rank whose last joining has failed, since the others cannot know which of its tries they meet.
Agreement agree(const Place& place, const InitOptions& options);
/// To be called when the joining that was agreed on has gone well.
void note_joined(const Place& place, const Agreement& agreement);

/// Equal in processes of one host: they can map each other's memory, and reach each other by its loopback address.
std::string host_id();

}  // namespace tandem::parallel
