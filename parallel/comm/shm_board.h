// The board: what the ranks of a group tell each other in memory that all of them reach.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include <tandem/parallel/comm/collective.h>

namespace tandem::parallel {

inline constexpr std::size_t kSmallBytes = 8 << 10;  // inputs up to this size are copied with the post

/// Where the others find the data of a call. `area` is one of these, or the number of an allocation.
struct Location {
  static constexpr std::int64_t kNowhere = -1, kWithPost = -2;
  std::int64_t area = kNowhere, offset = 0;
};

/// A call as its rank posts it: when the call before it has ended, so that calls have their effects in order.
struct alignas(64) Post {
  Fingerprint call = {};
  Location input = {};
};

/// What one rank tells. Only that rank writes it.
struct alignas(64) Member {
  static constexpr std::int32_t kPresent = 0, kLeft = 1, kGaveUp = 2;  // kGaveUp + i: because of rank i
  std::atomic<std::uint64_t> posted{0};                                // calls so far
  std::atomic<std::uint64_t> steps{0};  // steps of calls done so far; every rank does the same ones
  std::atomic<std::int32_t> state{kPresent};
  // Whether it may be touching the others' data. Note [Steps and ranks that give up]: a rank enters, and then looks at
  // all states; one that gives up says so in its state, and then waits until nobody is inside. Thus no rank touches the
  // data of one that has given up, which may free them.
  alignas(64) std::atomic<bool> inside{false};
  Post posts[2];  // call i is in posts[i % 2]; the one before stays, for errors that tell where a rank was last seen
  char message[kMaxMessageBytes + 1] = {};  // of fail
};

/// One end of a channel. Only its rank writes it.
struct alignas(64) ChannelEnd {
  std::atomic<std::uint64_t> posted{0};  // messages so far
  std::atomic<std::uint64_t> moved{0};   // bytes put in, or taken out, so far
  Fingerprint calls[2] = {};             // of message i in calls[i % 2]; the one before stays while the other reads it
};
/// The way from one rank to another, for messages. A ring of bytes follows it.
struct Channel {
  ChannelEnd sender, receiver;
};

/// Wakes ranks that sleep. Whoever changes a Member or a Channel rings it.
class Bell {
 public:
  void ring();
  /// Sleeps until the next ring, or for `seconds`; not at all if `ready` is true, which is asked after this rank
  /// counts as asleep.
  template <class Ready>
  void sleep(double seconds, const Ready& ready) {
    sleepers_.fetch_add(1);
    const std::uint32_t now = rings_.load();
    if (!ready()) wait_for_ring(now, seconds);
    sleepers_.fetch_sub(1);
  }

 private:
  void wait_for_ring(std::uint32_t now, double seconds);
  std::atomic<std::uint32_t> rings_{0}, sleepers_{0};
};

/// The start of a group's memory; the members and the channels follow it.
struct alignas(64) Board {
  Bell bell;
};

}  // namespace tandem::parallel
