// Guardian: a shell that kills what a launcher leaves behind when it is killed itself.
#pragma once
#include <string>

#include <sys/types.h>

namespace tandem::parallel {

/// Waits for the end of this process, then does what kill_processes_with(entry) does. PR_SET_PDEATHSIG alone reaches
/// the direct children of a launcher, not what they have started.
class Guardian {
 public:
  /// Starts the shell; Error when that cannot be done.
  explicit Guardian(const std::string& entry);
  /// Ends it without its work.
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;
  /// False when somebody has killed it.
  bool alive() const;

 private:
  pid_t pid_ = -1;
  int socket_ = -1;
};

}  // namespace tandem::parallel
