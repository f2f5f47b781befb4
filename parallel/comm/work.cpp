#include <tandem/parallel/comm/work.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace tandem::parallel {
namespace {
using Clock = std::chrono::steady_clock;
constexpr auto kLongestPause = std::chrono::microseconds(500);

class Failing final : public Work::State {
 public:
  Failing(Work told, const std::exception_ptr& error) : told_(std::move(told)) { error_ = error; }
  bool poll() override { return told_.is_completed(); }
  void wait() override {
    try {
      told_.wait();
    } catch (...) {  // the error itself is on its way
    }
    std::rethrow_exception(error_);
  }

 private:
  const Work told_;
  std::exception_ptr error_;
};

}  // namespace

Work Work::failing(Work told, const std::exception_ptr& error) {
  return Work(std::make_shared<Failing>(std::move(told), error));
}

bool Work::wait(double seconds) const {
  const auto begin = Clock::now();
  for (auto pause = std::chrono::microseconds(1); !is_completed(); pause = std::min(2 * pause, kLongestPause)) {
    if (std::chrono::duration<double>(Clock::now() - begin).count() >= seconds) return false;
    std::this_thread::sleep_for(pause);
  }
  wait();
  return true;
}

std::exception_ptr Work::exception() const {
  if (!is_completed()) return nullptr;
  try {
    wait();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace tandem::parallel
