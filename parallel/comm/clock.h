// Seconds and the steady clock. All of it is inline, since the module of the backend mpi takes nothing from the
// library.
#pragma once
#include <chrono>

namespace tandem::parallel {

/// Seconds as the clock counts them.
inline std::chrono::steady_clock::duration clock_ticks(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

/// The steady clock's time in seconds.
inline double clock_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace tandem::parallel
