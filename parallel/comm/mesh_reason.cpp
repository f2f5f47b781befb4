#include <tandem/parallel/comm/mesh_reason.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <optional>
#include <sstream>
#include <thread>

#include <fmt/format.h>

#include <tandem/parallel/comm/mesh_hosts.h>
#include <tandem/parallel/comm/mesh_keys.h>
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
// That the store may need beside these.
constexpr auto kAnswerTime = Milliseconds(300);

// An error's text without its "rank 1 of 4: ".
std::string without_prefix(const std::string& text) {
  const std::size_t colon = text.find(": ");
  return text.starts_with("rank ") && colon != std::string::npos ? text.substr(colon + 2) : text;
}

bool is_message(const Fingerprint& call) {
  const auto operation = static_cast<Operation>(call.operation);
  return operation == Operation::send || operation == Operation::recv;
}

// One failure as one member sees it.
class Inquiry {
 public:
  Inquiry(const GroupSetup& setup, int rank, const ExchangeError& error, const Fingerprint& call)
      : setup_(setup),
        store_(*setup.store),
        rank_(rank),
        error_(error),
        call_(call),
        late_time_(plan_hosts(setup.hosts).worth_it ? kLateTimeOnHosts : kLateTime) {}

  /// In all.
  double seconds() const { return std::chrono::duration<double>(late_time_ + 2 * kReasonTime + kAnswerTime).count(); }
  /// The first reason that any member has found holds for all.
  Reason find_reason() const {
    if (!error_.late) {
      const auto known = look_around(late_time_ + 2 * kReasonTime);
      return known ? *known : publish(setup_, closed());
    }
    if (is_message(call_)) return publish(setup_, ended(error_.peers.front()).value_or(kept_waiting()));
    const auto late = [&](int r) { return fmt::format("{}/late/{}", setup_.name, r); };
    store_.set(late(rank_), "1");
    std::optional<Reason> known = look_around(late_time_);
    if (known) return *known;
    std::vector<int> silent;
    for (const int r : error_.peers)
      if (!store_.check(late(r))) silent.push_back(r);
    // Peers that waited in vain too know whom to blame.
    if (silent.empty()) known = look_around(kReasonTime);
    return known ? *known : publish(setup_, {.ranks = silent.empty() ? error_.peers : silent});
  }
  /// When the store is of no use.
  Reason closed() const { return {{error_.peers.front()}, fmt::format("has closed its connection ({})", error_.text)}; }
  /// What others are told about the peer of a message; this rank itself says more.
  Reason kept_waiting() const {
    return {{error_.peers.front()},
            fmt::format("kept {} waiting for {} s in {}", setup_.rank_name(rank_), setup_.timeout_seconds,
                        describe(call_))};
  }

 private:
  bool is_peer(int r) const { return std::find(error_.peers.begin(), error_.peers.end(), r) != error_.peers.end(); }
  std::optional<Reason> ended(int r) const {
    const std::string key = ended_key(setup_.ranks[static_cast<std::size_t>(r)]);
    if (r == rank_ || !store_.check(key)) return std::nullopt;
    return Reason{{r}, store_.get(key)};
  }
  // A reason that is known, or a rank that has ended, those of the error first; a message is a matter of its peer
  // alone. A rank that has ended well may have done its part: it is to blame if the error is about it and, after a
  // while, about nobody else. Null when the time is over.
  std::optional<Reason> look_around(Milliseconds time) const {
    std::vector<int> ranks = error_.peers;
    for (int r = 0; r < static_cast<int>(setup_.ranks.size()) && !is_message(call_); ++r)
      if (!is_peer(r)) ranks.push_back(r);
    const auto begin = Clock::now();
    for (;;) {
      const auto passed = Clock::now() - begin;
      if (store_.check(lost_key(setup_))) return Reason::from_text(setup_, store_.get(lost_key(setup_)));
      std::optional<Reason> left;
      for (const int r : ranks) {
        const std::optional<Reason> reason = ended(r);
        if (reason && !ended_well(reason->how)) return publish(setup_, *reason);
        if (reason && !left && is_peer(r)) left = reason;
      }
      if (left && passed >= std::min(time, kReasonTime)) return publish(setup_, *left);
      if (passed >= time) return std::nullopt;
      std::this_thread::sleep_for(Milliseconds(10));
    }
  }

  const GroupSetup& setup_;
  Store& store_;
  const int rank_;
  const ExchangeError& error_;
  const Fingerprint& call_;
  const Milliseconds late_time_;
};

}  // namespace

std::string Reason::to_text() const { return fmt::format("{}|{}", fmt::join(ranks, ","), how); }

Reason Reason::from_text(const GroupSetup& setup, const std::string& text) {
  const std::size_t bar = std::min(text.find('|'), text.size());
  Reason reason{.how = text.substr(std::min(bar + 1, text.size()))};
  std::istringstream numbers(text.substr(0, bar));
  for (std::string number; std::getline(numbers, number, ',');) {
    int rank = -1;
    std::from_chars(number.data(), number.data() + number.size(), rank);
    if (rank >= 0 && rank < static_cast<int>(setup.ranks.size())) reason.ranks.push_back(rank);
  }
  return reason;
}

Reason publish(const GroupSetup& setup, const Reason& reason) {
  return Reason::from_text(setup, setup.store->compare_set(lost_key(setup), "", reason.to_text()));
}

CommError explain(const GroupSetup& setup, int rank, const ExchangeError& error, const Fingerprint& call) {
  const std::string what = describe(call), me = who(rank, static_cast<int>(setup.ranks.size()));
  const Inquiry inquiry(setup, rank, error, call);
  const AnswerLimit limit(inquiry.seconds());
  Reason reason;
  std::string note;
  try {
    reason = inquiry.find_reason();
    if (reason.to_text() == inquiry.kept_waiting().to_text()) reason.how.clear();
  } catch (const CommError& e) {  // the store is lost, or silent
    note = "; " + without_prefix(e.what());
    const bool lost = dynamic_cast<const SilentStore*>(&e) == nullptr && e.rank() >= 0;
    const auto found = std::find(setup.ranks.begin(), setup.ranks.end(), e.rank());
    const auto holder = static_cast<int>(found - setup.ranks.begin());
    // A holder that had come, and has left because another rank has not, is not to blame.
    const bool missed = std::find(error.peers.begin(), error.peers.end(), holder) != error.peers.end();
    if (lost && found != setup.ranks.end() && (missed || !error.late))
      reason = {{holder}, "has ended"};
    else
      reason = error.late ? Reason{.ranks = error.peers} : inquiry.closed();
  } catch (const std::exception& e) {
    reason = {{error.peers.front()}, fmt::format("cannot be reached ({})", error.text)};
    note = std::string("; ") + e.what();
  }
  if (reason.ranks.empty()) reason.ranks = error.peers;
  const int first = reason.ranks.front();
  std::string ranks;
  for (const int r : reason.ranks) ranks += (ranks.empty() ? "" : " and ") + setup.rank_name(r);
  if (!reason.how.empty() && first == rank)
    return {first,
            fmt::format("{}lost its connections in {}: the other ranks have found that it {}", me, what, reason.how)};
  if (!reason.how.empty())
    return {first, fmt::format("{}{} {} while this rank waited in {}{}", me, ranks, reason.how, what, note)};
  if (first == rank)
    return {first,
            fmt::format("{}came to {} after the other ranks had given up waiting for it; a longer wait is set by "
                        "InitOptions::timeout_seconds",
                        me, what)};
  return {first, me + waited_in_vain(call, setup.timeout_seconds, ranks) + note};
}

}  // namespace tandem::parallel
