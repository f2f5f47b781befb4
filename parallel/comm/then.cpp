#include <tandem/parallel/comm/then.h>

#include <optional>
#include <utility>

#include <tandem/parallel/comm/start_limit.h>

namespace tandem::parallel {
namespace {

std::exception_ptr error_of(const Work& work) {
  try {
    work.wait();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

class Chain final : public Work::State {
 public:
  // Without a group, `next` starts nothing.
  Chain(Work first, std::shared_ptr<ProcessGroup> group, UniqueFunction<Work()> next)
      : work_(std::move(first)), group_(std::move(group)), next_(std::move(next)) {}

  // See Note [Continuations].
  bool poll() override {
    if (ended_ || !work_.is_completed()) return ended_;
    return !group_ || (work_.exception() && !work_.failed_alone());
  }
  void wait() override {
    if (!ended_) run();
    if (error_) std::rethrow_exception(error_);
  }
  bool failed_alone() const override { return alone_; }

 private:
  void run() {
    const UniqueFunction<Work()> next = std::exchange(next_, {});
    check(static_cast<bool>(next), "then", "what follows a work waits for that same work; leave the wait out");
    end(work_);
    bool missing = group_ && alone_;  // the others start what follows, and this rank does not
    if (!error_) {
      const Started started = start(next);
      missing = group_ && error_ && !started.sent;
      end(started.own);
      // Where a rank has failed in place of its collective, nothing follows there.
      std::optional<StartLimit> closed;
      if (missing || started.own.exception()) closed.emplace(group_.get(), 0, kNothingFollows);
      for (const Work& work : started.all) end(work);
      end(work_);
    }
    if (missing) {
      (void)error_of(fail_with(*group_, "what follows a collective", error_));
      alone_ = false;
    }
    ended_ = true;
    work_ = {};
    group_ = {};
  }

  // Waits for a part of this work.
  void end(const Work& work) {
    const std::exception_ptr error = error_of(work);
    if (!error) return;
    alone_ = work.failed_alone() && (alone_ || !error_);
    if (!error_) error_ = error;
  }
  struct Started {
    bool sent = false;  // the group's collective
    Work own = {};      // which is this
    std::vector<Work> all = {};
  };
  // Calls what follows, and returns what it has started, whatever it gives for it.
  Started start(const UniqueFunction<Work()>& next) {
    const StartLimit limit(
        group_.get(), group_ ? 1 : 0,
        group_ ? fmt::format("[then] rank {} of {}: what follows a work wants to start a second collective, and must "
                             "start one; chain it by another then()",
                             group_->rank(), group_->size())
               : "[then] what follows a work wants to start a collective, but without a group it communicates nothing; "
                 "write then(work, group, next)");
    try {
      work_ = {};
      work_ = next();
      limit.verify();
      if (group_)
        check(limit.count() == 1, "then",
              "rank {} of {}: what follows a work has started no collective of the group, and must start one",
              group_->rank(), group_->size());
      limit.send();
    } catch (...) {
      error_ = std::current_exception();
      alone_ = true;
    }
    if (error_ && limit.sent() && !limit.failed()) give_up_after(*group_, "what follows a collective", error_);
    return {.sent = limit.sent(), .own = limit.own(), .all = limit.works()};
  }

  Work work_;
  std::shared_ptr<ProcessGroup> group_;
  UniqueFunction<Work()> next_;
  std::exception_ptr error_;
  bool ended_ = false, alone_ = false;
};

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception of another kind than std::exception";
  }
}

// A hook's Work ends when all of its continuations have, also where it returns another.
Work remembered(std::shared_ptr<Work::State> state) {
  Work work(std::move(state));
  StartLimit::remember(work);
  return work;
}

}  // namespace

Work then(Work first, UniqueFunction<void()> next) {
  return remembered(std::make_shared<Chain>(std::move(first), nullptr, [next = std::move(next)] {
    next();
    return Work();
  }));
}

Work then(Work first, std::shared_ptr<ProcessGroup> group, UniqueFunction<Work()> next) {
  check(group != nullptr, "then", "the group is null; give the one whose collective follows");
  return remembered(std::make_shared<Chain>(std::move(first), std::move(group), std::move(next)));
}

Work fail_with(ProcessGroup& group, const std::string& what, const std::exception_ptr& error) {
  Work told;
  try {
    told = group.fail(
        fmt::format("rank {} of {}: {} ended with an error: {}", group.rank(), group.size(), what, text_of(error)));
  } catch (const std::exception&) {  // the error itself is on its way
  }
  return Work::failing(std::move(told), error);
}

void give_up_after(ProcessGroup& group, const std::string& what, const std::exception_ptr& error) {
  group.give_up(fmt::format(
      "rank {} of {}: {} ended with an error after its collective had begun, so the ranks may be out of step, and the "
      "process group is of no use any more; to go on, call destroy_process_group and init_process_group on every rank, "
      "and wrap the model anew: {}",
      group.rank(), group.size(), what, text_of(error)));
}

}  // namespace tandem::parallel
