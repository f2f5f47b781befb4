#include <tandem/parallel/comm/peer_wait.h>

#include <algorithm>
#include <thread>

#include <fmt/format.h>

#include <tandem/parallel/comm/store_limits.h>

namespace tandem::parallel {

PeerWait::PeerWait(const GroupSetup& setup) : setup_(setup) {}

std::string PeerWait::me() const { return who(setup_.place(), static_cast<int>(setup_.ranks.size())); }

std::optional<std::string> PeerWait::end_of(int member) const {
  const std::string key = ended_key(setup_.ranks[static_cast<std::size_t>(member)]);
  return setup_.store->check(key) ? std::optional(setup_.store->get(key)) : std::nullopt;
}

void PeerWait::check_time(int member) const {
  if (std::chrono::steady_clock::now() - begin_ > std::chrono::duration<double>(setup_.timeout_seconds))
    throw CommError(member, fmt::format("{}waited {} s for {} to make the group; every rank of the job makes it, "
                                        "member or not, in the same order",
                                        me(), setup_.timeout_seconds, setup_.rank_name(member)));
}

std::string PeerWait::value_of(const std::string& key, int member, FunctionRef<void()> meanwhile) const {
  constexpr auto kLongestPause = std::chrono::microseconds(10'000);
  for (auto pause = std::chrono::microseconds(50);; pause = std::min(2 * pause, kLongestPause)) {
    if (setup_.store->check(key)) return setup_.store->get(key);
    if (const auto how = end_of(member)) {
      if (setup_.store->check(key)) return setup_.store->get(key);  // set between the two looks
      throw CommError(member, fmt::format("{}{} {} before it made the group", me(), setup_.rank_name(member), *how));
    }
    check_time(member);
    meanwhile();
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace tandem::parallel
