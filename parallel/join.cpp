#include <tandem/parallel/join.h>

#include <algorithm>
#include <exception>

#include <fmt/ranges.h>

#include <tandem/autograd/grad_mode.h>
#include <tandem/parallel/joinable.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/trace.h>

namespace tandem::parallel {
namespace {

// What a rank says in an announcement: one number. Calls are positive.
constexpr std::int64_t kEnded = 0, kLeft = -1, kEnters = -2;
constexpr std::int64_t kBase = 16;

struct Call {
  int number = 0, call = 0, detail = 0;
  bool shadowed = false;  // said by an ended rank, inside a shadow

  std::int64_t code() const { return 1 + (shadowed ? 1 : 0) + 2 * (detail + kBase * (call + kBase * number)); }
  static Call of(std::int64_t code) {
    const std::int64_t rest = (code - 1) / 2;
    return {.number = static_cast<int>(rest / kBase / kBase),
            .call = static_cast<int>(rest / kBase % kBase),
            .detail = static_cast<int>(rest % kBase),
            .shadowed = (code - 1) % 2 == 1};
  }
  bool same(const Call& other) const { return number == other.number && call == other.call; }
};

class Raised {
 public:
  explicit Raised(bool& flag) : flag_(flag), before_(std::exchange(flag, true)) {}
  ~Raised() { flag_ = before_; }
  Raised(const Raised&) = delete;
  Raised& operator=(const Raised&) = delete;

 private:
  bool& flag_;
  bool before_;
};

thread_local constinit bool t_in_a_join = false;

}  // namespace

// What one rank knows of the joins of a group.
class Joins {
 public:
  explicit Joins(ProcessGroup& group) : group_(group) {}
  static const std::shared_ptr<Joins>& of(ProcessGroup& group) {
    if (!group.joins_) group.joins_ = std::make_shared<Joins>(group);
    return group.joins_;
  }

  int enroll(Joinable& member) {
    members_.push_back(&member);
    return static_cast<int>(members_.size()) - 1;
  }
  void strike(int number) { members_[static_cast<std::size_t>(number)] = nullptr; }
  bool under_way() const { return under_way_; }
  static bool under_way(const ProcessGroup& group) { return group.joins_ && group.joins_->under_way_; }

  Participants announce(Call call) {
    if (!under_way_) return {};
    if (over_) std::rethrow_exception(over_);
    call.shadowed = shadowing_;
    return round(call.code()).who;
  }

  int run(FunctionRef<void()> body, const JoinOptions& options) {
    check(!t_in_a_join, "join", "{}a join is under way in this rank already; train all models in the loop of one join",
          me());
    options_ = options;
    over_ = nullptr;
    shadowed_ = lacks_steps_ = false;
    lowest_ = 0;
    took_part_.clear();
    enter();
    {
      const Raised in_a_join(t_in_a_join), under_way(under_way_);
      try {
        body();
        try {
          shadow_others();
        } catch (const CommError& e) {
          if (!lacks_steps_) throw;
          throw CommError(e.rank(), fmt::format("{}; the loop of rank {} was over, so that it lacks the others' steps "
                                                "since: before more training load a checkpoint, or broadcast_state of "
                                                "rank {}, on every rank",
                                                e.what(), group_.rank(), lowest_));
        }
      } catch (const std::exception& e) {
        leave(e.what());
        throw;
      } catch (...) {
        leave("an exception of an unknown type");
        throw;
      }
    }
    for (const int number : took_part_)
      if (Joinable* member = members_[static_cast<std::size_t>(number)]) member->take_over(lowest_, shadowed_);
    return lowest_;
  }

 private:
  // What all ranks have said.
  struct Round {
    bool over = false;  // all have ended
    Call call;          // of the live ranks
    Participants who;
  };

  std::string me() const { return fmt::format("rank {} of {}: ", group_.rank(), group_.size()); }

  // Every rank's number.
  std::vector<std::int64_t> exchange(std::int64_t mine, JoinStage stage) {
    const trace::Span span("join");
    const NoGradGuard no_grad;
    Tensor all = zeros({group_.size()}, {.dtype = int64});
    group_
        .run({.operation = Operation::all_gather,
              .input = full({1}, mine, {.dtype = int64}),
              .output = all,
              .stage = stage})
        .wait();
    return all.to_vector<std::int64_t>();
  }

  void enter() {
    const std::int64_t how = (options_.divide_by_initial_world_size ? 1 : 0) +
                             (options_.throw_on_early_termination ? 2 : 0) +
                             4 * static_cast<std::int64_t>(members_.size());
    const std::vector<std::int64_t> all = exchange(kEnters - how, JoinStage::starts);
    const auto odd = std::ranges::find_if(all, [&](std::int64_t code) { return code != all.front(); });
    if (odd == all.end()) return;
    const auto text = [](std::int64_t code) {
      const std::int64_t h = kEnters - code;
      return fmt::format("divide_by_initial_world_size = {}, throw_on_early_termination = {} and {} wrapped models",
                         h % 2 == 1, h / 2 % 2 == 1, h / 4);
    };
    const int other = static_cast<int>(odd - all.begin());
    throw CommError(other, fmt::format("{}the ranks join with different options: rank 0 with {}, rank {} with {}; "
                                       "join, and wrap before it, alike on every rank",
                                       me(), text(all.front()), other, text(*odd)));
  }

  Round round(std::int64_t mine) {
    const std::vector<std::int64_t> codes =
        exchange(mine, mine == kEnded || shadowing_ ? JoinStage::ended : JoinStage::goes_on);
    if (std::ranges::find(codes, kLeft) != codes.end()) end_with_a_reason();
    Round r;
    int live = -1;
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const int rank = static_cast<int>(i);
      const Call call = Call::of(codes[i]);
      if (codes[i] == kEnded || call.shadowed) {
        r.who.ended.push_back(rank);
      } else if (live < 0) {
        live = rank;
        r.call = call;
      }
    }
    if (live < 0) {
      r.over = true;
      return r;
    }
    for (std::size_t i = 0; i < codes.size(); ++i)
      if (codes[i] != kEnded && !Call::of(codes[i]).same(r.call))
        throw CommError(static_cast<int>(i),
                        fmt::format("{}in a join the ranks disagree: rank {} begins {}, rank {} begins {}; every rank "
                                    "with a batch must do the same with it",
                                    me(), live, name_of(r.call), i, name_of(Call::of(codes[i]))));
    if (options_.throw_on_early_termination && !r.who.ended.empty()) {
      const bool one = r.who.ended.size() == 1;
      over_ = std::make_exception_ptr(Error(fmt::format(
          "[join] {}rank{} {} {} ended, while rank {} begins {}; throw_on_early_termination asks for the same number "
          "of batches on every rank",
          me(), one ? "" : "s", fmt::join(r.who.ended, ", "), one ? "has" : "have", live, name_of(r.call))));
      std::rethrow_exception(over_);
    }
    const auto count = static_cast<double>(codes.size());
    r.who.lowest = lowest_ = live;
    r.who.detail = r.call.detail;
    if (!options_.divide_by_initial_world_size) r.who.scale = count / (count - static_cast<double>(r.who.ended.size()));
    if (std::ranges::find(took_part_, r.call.number) == took_part_.end()) took_part_.push_back(r.call.number);
    return r;
  }

  std::string name_of(const Call& call) const {
    const auto at = static_cast<std::size_t>(call.number);
    const Joinable* member = at < members_.size() ? members_[at] : nullptr;
    if (member == nullptr)
      return fmt::format("a call of a model or optimizer (number {}) that is gone here", call.number);
    return fmt::format("{} (number {})", member->name_of(call.call), call.number);
  }

  void shadow_others() {
    if (over_) std::rethrow_exception(over_);  // which the body has caught
    for (;;) {
      const Round r = round(kEnded);
      if (r.over) return;
      lacks_steps_ = lacks_steps_ || shadowed_;  // the others have gone on
      shadowed_ = true;
      const Raised shadowing(shadowing_);
      Joinable* member = members_[static_cast<std::size_t>(r.call.number)];
      try {
        if (member == nullptr)
          group_
              .fail(
                  fmt::format("{}its loop is over, and the model or optimizer (number {}) with which others go on was "
                              "destroyed here; keep it until the join has ended",
                              me(), r.call.number))
              .wait();
        else
          member->shadow(r.call.call, r.who);
        lacks_steps_ = lacks_steps_ || member != nullptr;
      } catch (const std::exception&) {  // the live ranks have it, too; they go on, or leave with a reason
      }
    }
  }

  // See Note [Announcements]. Never throws: the reason is on its way.
  void leave(const std::string& reason) {
    if (over_) return;  // on all ranks
    over_ = std::current_exception();
    bool in_step = true;
    try {
      exchange(kLeft, JoinStage::stops);
    } catch (const std::exception&) {
      in_step = false;  // the others were in something else, and leave in their turn
    }
    try {
      const Work last = group_.fail(me() + "its part of the join ended with an error: " + reason);
      if (in_step) last.wait();
    } catch (const std::exception&) {
    }
  }

  // Some rank has left.
  [[noreturn]] void end_with_a_reason() {
    try {
      group_.run({.operation = Operation::barrier, .stage = JoinStage::stops}).wait();
      fail("join", "{}a rank has left the join", me());
    } catch (...) {
      over_ = std::current_exception();
      throw;
    }
  }

  ProcessGroup& group_;
  std::vector<Joinable*> members_;  // by number; null when it is gone
  JoinOptions options_;
  bool under_way_ = false, shadowing_ = false;
  bool shadowed_ = false;       // in this join this rank has shadowed others
  bool lacks_steps_ = false;    // which may have made steps meanwhile
  int lowest_ = 0;              // of the live ranks in the last round
  std::vector<int> took_part_;  // numbers of members that were announced
  std::exception_ptr over_;     // the join has ended on all ranks, with this
};

Joinable::~Joinable() {
  if (joins_) joins_->strike(number_);
}

void Joinable::enroll(ProcessGroup& group) {
  joins_ = Joins::of(group);
  number_ = joins_->enroll(*this);
}

Participants Joinable::announce(int call, int detail) const {
  if (!joins_) return {};
  return joins_->announce({.number = number_, .call = call, .detail = detail});
}

bool Joinable::joining(const ProcessGroup& group) { return Joins::under_way(group); }

bool Joinable::joining() const { return joins_ && joins_->under_way(); }

int join(FunctionRef<void()> body, const JoinOptions& options, const std::shared_ptr<ProcessGroup>& given) {
  const std::shared_ptr<ProcessGroup> group = or_default(given);
  check(group->rank() >= 0, "join", "this process is not a member of the group; only its members join");
  return Joins::of(*group)->run(body, options);
}

}  // namespace tandem::parallel
