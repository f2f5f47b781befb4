// Guardian: a shell that kills what a launcher leaves behind when it is killed itself.
#pragma once
#include <sys/types.h>

namespace tandem::parallel {

inline constexpr int kMaxRanksPerNode = 4096;

/// Learns through a socket which process groups start and end. At end of file it kills those that are left.
/// PR_SET_PDEATHSIG alone reaches the direct children of a launcher, not what they have started.
class Guardian {
 public:
  /// Starts the process; Error when that cannot be done.
  Guardian();
  /// Kills the groups that are left.
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;
  int socket() const { return socket_; }
  /// Tells the guardian at that socket of a group. A child calls it between fork and exec, so that no moment is left in
  /// which nobody knows of it; the launcher says that a group has ended before it reaps its leader, whose number may
  /// be given to another process then.
  static void group_started(int socket, pid_t group);
  static void group_ended(int socket, pid_t group);

 private:
  pid_t pid_ = -1;
  int socket_ = -1, descriptor_ = -1;
};

}  // namespace tandem::parallel
