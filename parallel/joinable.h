// What can take part in a join: something whose collectives ranks without batches can shadow.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <tandem/parallel/comm/process_group.h>

namespace tandem::parallel {

class Joins;

/// Who takes part in a set of collectives with batches of its own. All ranks know the same.
struct Participants {
  int lowest = 0;               // of the live ranks
  std::vector<int> ended = {};  // the others, increasing
  int detail = 0;               // what the lowest live rank has announced beside the call
  double scale = 1;             // what an average over all ranks is multiplied by
};

/// Note [Announcements]: while a join is under way, a live rank announces each set of collectives before it starts the
/// first of them. An announcement is a collective too, in which ended ranks wait; then these do their share of the set,
/// by `shadow`, and wait in the next. Between an announcement and its collectives nothing may throw on one rank alone.
/// A rank that leaves by an exception announces that, and then fails one more collective, with the reason.
class Joinable {
 public:
  Joinable() = default;
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;
  virtual ~Joinable();

  /// Makes it known to the group, outside of a join. All ranks do this in the same order.
  void enroll(ProcessGroup& group);
  /// For errors: "the backward of DistributedDataParallel".
  virtual std::string name_of(int call) const = 0;
  /// Does an ended rank's share of what live ranks do after announcing `call`. What it throws is dropped: the live
  /// ranks get it too, and decide whether to go on.
  virtual void shadow(int call, const Participants& who) = 0;
  /// All loops are over: takes over what rank `root` has. `ended`: this rank has shadowed others.
  virtual void take_over(int root, bool ended) = 0;

  /// Says that the collectives of `call`, 0 to 15, follow, with a `detail`, 0 to 15; all live ranks say the same call.
  /// Outside a join it does nothing. In a `shadow` it may be called where live ranks call it. CommError or Error where
  /// the join has come to its end.
  Participants announce(int call, int detail = 0) const;
  /// Whether a join of the group is under way.
  bool joining() const;
  static bool joining(const ProcessGroup& group);

 private:
  std::shared_ptr<Joins> joins_;
  int number_ = 0;  // in the order of enrolment
};

}  // namespace tandem::parallel
