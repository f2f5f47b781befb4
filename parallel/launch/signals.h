// SignalReceiver: the signals that a launcher passes on to its ranks.
#pragma once
#include <array>
#include <optional>

#include <signal.h>

namespace tandem::parallel {

inline constexpr std::array kForwardedSignals{SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
/// Whether the job ends with it.
constexpr bool ends_job(int signal) { return signal != SIGUSR1 && signal != SIGUSR2; }

/// While it lives, these signals are noted instead of having their effect. Those that the program ignores, as under
/// nohup, or handles itself are left alone.
class SignalReceiver {
 public:
  SignalReceiver();
  ~SignalReceiver();
  SignalReceiver(const SignalReceiver&) = delete;
  SignalReceiver& operator=(const SignalReceiver&) = delete;
  /// A signal that has come and has not been returned yet.
  std::optional<int> next();

 private:
  std::array<bool, kForwardedSignals.size()> taken_{};
};

}  // namespace tandem::parallel
