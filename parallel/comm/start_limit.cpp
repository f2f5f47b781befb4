#include <tandem/parallel/comm/start_limit.h>

#include <mutex>
#include <utility>

namespace tandem::parallel {
namespace {
thread_local StartLimit* innermost = nullptr;
}  // namespace

// Starts when it is sent or waited for, by whatever thread that is.
class StartLimit::Held final : public Work::State {
 public:
  explicit Held(UniqueFunction<Work()> start) : start_(std::move(start)) {}
  void send() {
    const std::lock_guard lock(mutex_);
    if (start_) try {
        work_ = start_();
        sent_ = true;
      } catch (...) {
        error_ = std::current_exception();
      }
    start_ = {};
    if (error_) std::rethrow_exception(error_);
  }
  void cancel() {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(start_, {})) return;
    error_ = std::make_exception_ptr(Error("[Work] the collective was never started: what has called it has thrown"));
  }
  bool sent() {
    const std::lock_guard lock(mutex_);
    return sent_;
  }
  bool poll() override {
    try {
      send();
    } catch (...) {
      return true;
    }
    return work_.is_completed();
  }
  void wait() override {
    send();
    work_.wait();
  }
  bool failed_alone() const override { return work_.failed_alone(); }

 private:
  std::mutex mutex_;
  UniqueFunction<Work()> start_;
  Work work_;
  std::exception_ptr error_;
  bool sent_ = false;
};

StartLimit::StartLimit(const ProcessGroup* group, int most, std::string refusal)
    : group_(group), most_(most), refusal_(std::move(refusal)), outer_(std::exchange(innermost, this)) {}
StartLimit::~StartLimit() {
  innermost = outer_;
  if (held_) held_->cancel();
}

void StartLimit::send() const {
  if (held_) held_->send();
}
bool StartLimit::sent() const { return held_ && held_->sent(); }
bool StartLimit::failed() const { return held_ && Work(held_).exception() != nullptr; }

void StartLimit::verify() const {
  if (refused_) throw Error(refusal_);
}

StartLimit* StartLimit::before_start(const ProcessGroup& group) {
  StartLimit* holds = nullptr;
  for (StartLimit* limit = innermost; limit; limit = limit->outer_) {
    if (!limit->counts(group)) continue;
    limit->refused_ |= limit->count_ >= limit->most_;
    limit->verify();
    if (!holds) holds = limit;
  }
  for (StartLimit* limit = holds; limit; limit = limit->outer_) limit->count_ += limit->counts(group);
  return holds;
}

Work StartLimit::hold(UniqueFunction<Work()> start) {
  held_ = std::make_shared<Held>(std::move(start));
  return Work(held_);
}

void StartLimit::remember(const Work& work) {
  for (StartLimit* limit = innermost; limit; limit = limit->outer_) limit->works_.push_back(work);
}

}  // namespace tandem::parallel
