#include <tandem/parallel/comm/mesh_reason.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <optional>
#include <thread>

#include <fmt/format.h>

#include <tandem/parallel/comm/mesh_hosts.h>
#include <tandem/parallel/comm/peer_errors.h>
#include <tandem/parallel/comm/store_limits.h>

namespace tandem::parallel {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// How long ranks that waited in vain have to say so, and thus that they are not the one that is missing. In memory that
// a host shares they first wait a second for a process that may be stopped in the middle of a step.
constexpr auto kLateTime = Milliseconds(400), kLateTimeOnHosts = Milliseconds(1400);
// How much longer to look for the reason of a broken connection: a launcher needs a moment to see how a process ended.
constexpr auto kReasonTime = Milliseconds(400);

// An error's text without its "rank 1 of 4: ".
std::string without_prefix(const std::string& text) {
  const std::size_t colon = text.find(": ");
  return text.starts_with("rank ") && colon != std::string::npos ? text.substr(colon + 2) : text;
}

bool is_message(const Fingerprint& call) {
  const auto operation = static_cast<Operation>(call.operation);
  return operation == Operation::send || operation == Operation::recv;
}

// One failure as one member sees it. A reason is "<ranks>|<how it ended>", without the latter where the ranks are
// silent.
class Inquiry {
 public:
  Inquiry(const GroupSetup& setup, int rank, const ExchangeError& error, const Fingerprint& call)
      : setup_(setup),
        store_(*setup.store),
        rank_(rank),
        error_(error),
        call_(call),
        lost_(lost_key(setup)),
        late_time_(plan_hosts(setup.hosts).worth_it ? kLateTimeOnHosts : kLateTime) {}

  /// The first reason that any member has found holds for all.
  std::string find_reason() const {
    if (!error_.late) {
      const std::string known = look_around(late_time_ + 2 * kReasonTime);
      return known.empty() ? publish(closed()) : known;
    }
    if (is_message(call_)) return publish(ended(error_.peers.front()).value_or(kept_waiting()));
    const auto late = [&](int r) { return fmt::format("{}/late/{}", setup_.name, r); };
    store_.set(late(rank_), "1");
    std::string known = look_around(late_time_);
    if (!known.empty()) return known;
    std::vector<int> silent;
    for (const int r : error_.peers)
      if (!store_.check(late(r))) silent.push_back(r);
    // Peers that waited in vain too know whom to blame.
    if (silent.empty()) known = look_around(kReasonTime);
    return known.empty() ? publish(fmt::format("{}|", fmt::join(silent.empty() ? error_.peers : silent, " and ")))
                         : known;
  }
  /// When the store is of no use.
  std::string closed() const {
    return fmt::format("{}|has closed its connection ({})", error_.peers.front(), error_.text);
  }
  /// What others are told about the peer of a message; this rank itself says more.
  std::string kept_waiting() const {
    return fmt::format("{}|kept rank {} waiting for {} s in {}", error_.peers.front(), rank_, setup_.timeout_seconds,
                       describe(call_));
  }

 private:
  std::string publish(const std::string& reason) const { return store_.compare_set(lost_, "", reason); }
  std::optional<std::string> ended(int r) const {
    const std::string key = ended_key(setup_.ranks[static_cast<std::size_t>(r)]);
    if (r == rank_ || !store_.check(key)) return std::nullopt;
    return fmt::format("{}|{}", r, store_.get(key));
  }
  // A reason that is known, or a rank that has ended, those of the error first. Empty when the time is over.
  std::string look_around(Milliseconds time) const {
    std::vector<int> ranks = error_.peers;
    for (int r = 0; r < static_cast<int>(setup_.ranks.size()); ++r)
      if (std::find(ranks.begin(), ranks.end(), r) == ranks.end()) ranks.push_back(r);
    for (const auto end = Clock::now() + time;;) {
      if (store_.check(lost_)) return store_.get(lost_);
      for (const int r : ranks)
        if (const auto reason = ended(r)) return publish(*reason);
      if (Clock::now() >= end) return {};
      std::this_thread::sleep_for(Milliseconds(10));
    }
  }

  const GroupSetup& setup_;
  Store& store_;
  const int rank_;
  const ExchangeError& error_;
  const Fingerprint& call_;
  const std::string lost_;
  const Milliseconds late_time_;
};

}  // namespace

std::string lost_key(const GroupSetup& setup) { return setup.name + "/lost"; }

CommError explain(const GroupSetup& setup, int rank, const ExchangeError& error, const Fingerprint& call) {
  const std::string what = describe(call), me = who(rank, static_cast<int>(setup.ranks.size()));
  const Inquiry inquiry(setup, rank, error, call);
  std::string reason, note;
  try {
    reason = inquiry.find_reason();
    if (reason == inquiry.kept_waiting()) reason = fmt::format("{}|", error.peers.front());
  } catch (const CommError& e) {  // the store is lost, or silent
    note = "; " + without_prefix(e.what());
    const auto found = std::find(setup.ranks.begin(), setup.ranks.end(), e.rank());
    const auto holder = static_cast<int>(found - setup.ranks.begin());
    // A holder that had come, and has left because another rank has not, is not to blame.
    const bool missed = std::find(error.peers.begin(), error.peers.end(), holder) != error.peers.end();
    if (e.rank() >= 0 && found != setup.ranks.end() && (missed || !error.late))
      reason = fmt::format("{}|has ended", holder);
    else if (error.late)
      reason = fmt::format("{}|", fmt::join(error.peers, " and "));
    else
      reason = inquiry.closed();
  } catch (const std::exception& e) {
    reason = fmt::format("{}|cannot be reached ({})", error.peers.front(), error.text);
    note = std::string("; ") + e.what();
  }
  const std::size_t bar = std::min(reason.find('|'), reason.size());
  const std::string ranks = reason.substr(0, bar), how = reason.substr(std::min(bar + 1, reason.size()));
  int first = error.peers.front();
  std::from_chars(ranks.data(), ranks.data() + ranks.size(), first);
  if (!how.empty() && first == rank)
    return {first, fmt::format("{}lost its connections in {}: the other ranks have found that it {}", me, what, how)};
  if (!how.empty())
    return {first, fmt::format("{}rank {} {} while this rank waited in {}{}", me, ranks, how, what, note)};
  if (first == rank)
    return {first,
            fmt::format("{}came to {} after the other ranks had given up waiting for it; a longer wait is set by "
                        "InitOptions::timeout_seconds",
                        me, what)};
  return {first, me + waited_in_vain(call, setup.timeout_seconds, "rank " + ranks) + note};
}

}  // namespace tandem::parallel
