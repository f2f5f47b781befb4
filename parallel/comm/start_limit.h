// How many collectives hooks and continuations start: a rank that starts more or fewer than others comes out of step.
#pragma once
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <tandem/parallel/comm/process_group.h>
#include <tandem/tensor/callable.h>

namespace tandem::parallel {

/// While it exists, this thread starts at most `most` collectives of the group, or of any group where that is null. The
/// next one throws Error with `refusal` before anything is sent, so that the ranks stay in step. A collective of the
/// group is held back until `send`, or until somebody waits for it: where what has called it throws meanwhile,
/// ProcessGroup::fail can take its place, and the others do not go on to what would have followed.
class StartLimit {
 public:
  StartLimit(const ProcessGroup* group, int most, std::string refusal);
  /// A collective that is still held back will never start.
  ~StartLimit();
  StartLimit(const StartLimit&) = delete;
  StartLimit& operator=(const StartLimit&) = delete;
  /// How many collectives of the group were called.
  int count() const { return count_; }
  /// Starts what was held back, and throws what that throws.
  void send() const;
  /// Whether the others can see a collective of the group that was called here, and whether it has failed.
  bool sent() const;
  bool failed() const;
  /// All that was called meanwhile, in any group, and what follows it by `then`.
  const std::vector<Work>& works() const { return works_; }
  /// Throws again where a collective was refused, which what has run may have caught.
  void verify() const;

  /// What ProcessGroup does before it starts a collective: the one that holds it back, if there is one.
  static StartLimit* before_start(const ProcessGroup& group);
  /// The Work that stands for a collective until `start` starts it.
  Work hold(UniqueFunction<Work()> start);
  /// What ProcessGroup does with a Work that it gives out, and `then`.
  static void remember(const Work& work);

 private:
  class Held;
  bool counts(const ProcessGroup& group) const { return !group_ || group_ == &group; }
  const ProcessGroup* const group_;
  const int most_;
  const std::string refusal_;
  StartLimit* const outer_;
  int count_ = 0;
  bool refused_ = false;
  std::shared_ptr<Held> held_;
  std::vector<Work> works_;
};

}  // namespace tandem::parallel
