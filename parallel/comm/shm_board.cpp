#include <tandem/parallel/comm/shm_board.h>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace tandem::parallel {

// Both sides touch first their own word and then the other's, in one total order: either the sleeper sees the change
// that is announced here, or this sees the sleeper.
void Bell::ring() {
  if (sleepers_.load() == 0) return;
  rings_.fetch_add(1);
  syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);  // between processes: not the private kind
}

void Bell::wait_for_ring(std::uint32_t now, double seconds) {
  const auto whole = static_cast<time_t>(seconds);
  const timespec limit{whole, static_cast<long>((seconds - static_cast<double>(whole)) * 1e9)};
  syscall(SYS_futex, &rings_, FUTEX_WAIT, now, &limit, nullptr, 0);
}

}  // namespace tandem::parallel
