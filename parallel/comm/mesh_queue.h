// CallQueue: calls that run one after the other on a thread of their own, each with a Work.
#pragma once
#include <memory>

#include <tandem/parallel/comm/collective.h>
#include <tandem/parallel/comm/work.h>
#include <tandem/tensor/callable.h>

namespace tandem::parallel {

class CallQueue {
 public:
  /// `run` is called with each call in turn; what it throws is what the call's Work throws.
  explicit CallQueue(UniqueFunction<void(Collective&)> run);
  /// Runs what is queued first.
  ~CallQueue();
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;
  Work push(const Collective& call);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem::parallel
