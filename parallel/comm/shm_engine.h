// Engine: the collectives and messages of one rank in one group that shares memory. No thread works for it: a rank does
// its share when it starts a call, asks for it, or waits for any.
#pragma once
#include <sys/types.h>

#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <tandem/parallel/comm/shm_memory.h>
#include <tandem/parallel/comm/shm_messages.h>
#include <tandem/parallel/comm/shm_task.h>
#include <tandem/parallel/comm/shm_transfer.h>

namespace tandem::parallel {

/// The engines of one rank. Waiting in one group works for all of them, so that ranks may wait for works of several
/// groups in any order. Note [Ranks and threads]: a rank is whoever made the groups, one thread; the mutex lets its
/// other threads use them too.
struct RankEngines {
  std::mutex mutex;
  std::vector<Engine*> engines;
  /// Those of the groups that the calling thread makes.
  static const std::shared_ptr<RankEngines>& of_this_thread();
  void progress();
  void check_peers();
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(const GroupSetup& setup, std::shared_ptr<SharedMemory> memory);
  /// Waits until all ranks have made the group.
  void meet();
  std::shared_ptr<Task> start(const Collective& collective);
  /// Ends what was started, and leaves the group.
  void leave();
  /// Leaves the group at once; what was started ends with an error.
  void abandon(const std::string& why);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(setup_.ranks.size()); }
  const GroupSetup& setup() const { return setup_; }
  std::mutex& mutex() const { return siblings_->mutex; }

 private:
  friend class Task;
  friend struct RankEngines;
  // These are called with the mutex locked.
  void progress();
  void post(Task& task);
  bool advance(Task& task);
  bool move_data();
  void begin(Task& task);
  void end(Task& task);
  bool lacks(int member) const;
  std::exception_ptr disagreement(const Task& task, const std::vector<const Post*>& posts) const;
  void check_peers();
  void check_peer_of(const Messages::Lane& lane);
  void check_peers_of(const Fingerprint& call, double stalled_since, FunctionRef<bool(int)> lacks_member);
  std::string last_seen(int member, const Fingerprint& call) const;
  void lose(int member, const std::string& what);
  void stop(int member, const std::string& what, std::int32_t state);
  bool poll(Task& task);
  bool pending() const { return !tasks_.empty() || messages_.pending(); }

  void wait(Task& task);
  bool others_pending() const;
  std::string how_ended(int member, bool process_ended) const;

  GroupSetup setup_;
  std::shared_ptr<SharedMemory> memory_;
  std::shared_ptr<RankEngines> siblings_;
  int rank_ = 0;
  pid_t process_;          // a child of it that ends says nothing in its name
  bool own_cores_ = true;  // there are as many cores as ranks
  Messages messages_;
  std::deque<std::shared_ptr<Task>> tasks_;  // the collectives, in the order of their starts
  std::uint64_t started_ = 0, steps_ = 0;    // of all collectives
  // Of the first task:
  std::optional<StepTransfer> transfer_;  // once all ranks have come and agree
  int step_ = 0, step_count_ = 1;
  double stalled_since_ = 0;  // 0 while it goes on
  double checked_ = 0;        // when the peers were last looked at
  std::exception_ptr lost_;   // why no call can succeed any more
  bool left_ = false;
};

/// Does what can be done without waiting in all groups of this rank: others may wait for it there, while it waits for
/// something else.
void work_for_groups_of_this_thread();
/// For a thread that was a rank and ends: leaves all groups that it made.
void abandon_groups_of_this_thread();

}  // namespace tandem::parallel
