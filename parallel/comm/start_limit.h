// How many collectives hooks and continuations start: a rank that starts more than others comes out of step.
#pragma once
#include <exception>
#include <string>
#include <vector>

#include <tandem/parallel/comm/process_group.h>

namespace tandem::parallel {

/// While it exists, this thread starts at most `most` collectives of the group, or of any group where that is null. The
/// next one throws Error with `refusal` before anything is sent, so that the ranks stay in step.
class StartLimit {
 public:
  StartLimit(const ProcessGroup* group, int most, std::string refusal);
  ~StartLimit();
  StartLimit(const StartLimit&) = delete;
  StartLimit& operator=(const StartLimit&) = delete;
  /// How many collectives of the group were started.
  int count() const { return count_; }
  /// All that was started meanwhile, in any group, and what follows it by `then`.
  const std::vector<Work>& works() const { return works_; }
  /// Throws again where a collective was refused, which what has run may have caught.
  void verify() const;

  /// What ProcessGroup does before and after it starts a collective, and `then` when it makes a Work.
  static void before_start(const ProcessGroup& group);
  static void after_start(const ProcessGroup& group, const Work& work);
  static void remember(const Work& work);

 private:
  bool counts(const ProcessGroup& group) const { return !group_ || group_ == &group; }
  const ProcessGroup* const group_;
  const int most_;
  const std::string refusal_;
  StartLimit* const outer_;
  int count_ = 0;
  bool refused_ = false;
  std::vector<Work> works_;
};

}  // namespace tandem::parallel
