#include <tandem/parallel/launch/signals.h>

#include <atomic>

namespace tandem::parallel {
namespace {

std::array<std::atomic<int>, NSIG> received{};
static_assert(std::atomic<int>::is_always_lock_free);

void note(int signal) { received[static_cast<std::size_t>(signal)].fetch_add(1); }

}  // namespace

SignalReceiver::SignalReceiver() {
  for (std::size_t i = 0; i < kForwardedSignals.size(); ++i) {
    struct sigaction now {};
    sigaction(kForwardedSignals[i], nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) continue;
    received[static_cast<std::size_t>(kForwardedSignals[i])] = 0;
    now = {};
    now.sa_handler = note;
    now.sa_flags = SA_RESTART;
    taken_[i] = sigaction(kForwardedSignals[i], &now, nullptr) == 0;
  }
}

SignalReceiver::~SignalReceiver() {
  for (std::size_t i = 0; i < kForwardedSignals.size(); ++i)
    if (taken_[i]) signal(kForwardedSignals[i], SIG_DFL);
}

std::optional<int> SignalReceiver::next() {
  for (std::size_t i = 0; i < kForwardedSignals.size(); ++i) {
    std::atomic<int>& count = received[static_cast<std::size_t>(kForwardedSignals[i])];
    if (!taken_[i] || count.load() == 0) continue;
    count.fetch_sub(1);
    return kForwardedSignals[i];
  }
  return std::nullopt;
}

}  // namespace tandem::parallel
