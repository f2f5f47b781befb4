#include <tandem/parallel/comm/work.h>

namespace tandem::parallel {
namespace {

class Then final : public Work::State {
 public:
  Then(Work first, UniqueFunction<void()> after) : first_(std::move(first)), after_(std::move(after)) {}
  bool poll() override {
    if (!first_.is_completed()) return false;
    if (first_.exception() == nullptr) finish();
    return true;
  }
  void wait() override {
    first_.wait();
    finish();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void finish() {
    if (!after_) return;
    const UniqueFunction<void()> after = std::exchange(after_, {});
    try {
      after();
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  Work first_;
  UniqueFunction<void()> after_;
  std::exception_ptr error_;
};

}  // namespace

std::exception_ptr Work::exception() const {
  if (!is_completed()) return nullptr;
  try {
    wait();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

Work Work::then(UniqueFunction<void()> after) const { return Work(std::make_shared<Then>(*this, std::move(after))); }

}  // namespace tandem::parallel
