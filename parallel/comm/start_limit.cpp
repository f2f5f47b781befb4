#include <tandem/parallel/comm/start_limit.h>

#include <utility>

namespace tandem::parallel {
namespace {
thread_local StartLimit* innermost = nullptr;
}  // namespace

StartLimit::StartLimit(const ProcessGroup* group, int most, std::string refusal)
    : group_(group), most_(most), refusal_(std::move(refusal)), outer_(std::exchange(innermost, this)) {}
StartLimit::~StartLimit() { innermost = outer_; }

void StartLimit::verify() const {
  if (refused_) throw Error(refusal_);
}

void StartLimit::before_start(const ProcessGroup& group) {
  for (StartLimit* limit = innermost; limit; limit = limit->outer_) {
    limit->refused_ |= limit->counts(group) && limit->count_ >= limit->most_;
    if (limit->counts(group)) limit->verify();
  }
}

void StartLimit::after_start(const ProcessGroup& group, const Work& work) {
  for (StartLimit* limit = innermost; limit; limit = limit->outer_) limit->count_ += limit->counts(group);
  remember(work);
}

void StartLimit::remember(const Work& work) {
  for (StartLimit* limit = innermost; limit; limit = limit->outer_) limit->works_.push_back(work);
}

}  // namespace tandem::parallel
