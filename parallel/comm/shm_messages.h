// Messages: what one rank sends to and receives from the others of a group that shares memory.
#pragma once
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <tandem/parallel/comm/shm_memory.h>
#include <tandem/parallel/comm/shm_task.h>

namespace tandem::parallel {

/// The messages from one rank to another go through a channel, one after the other, without regard to anything else.
/// When both ends have posted a message they compare; a difference is an error on both. Then the sender copies into the
/// ring of the channel what fits, and the receiver copies it out. Neither touches the other's tensor.
class Messages {
 public:
  /// This rank's messages to a peer, or from it.
  struct Lane {
    int peer = 0;
    bool sends = false;
    std::uint64_t started = 0;  // messages so far
    std::deque<std::shared_ptr<Task>> tasks = {};
    // Of the first one:
    bool agreed = false;
    std::uint64_t moved = 0;   // bytes
    double stalled_since = 0;  // 0 while it goes on
  };

  Messages(const GroupSetup& setup, const SharedMemory& memory);
  std::shared_ptr<Task> start(std::shared_ptr<Engine> engine, const Collective& message);
  /// Does what can be done without waiting for another rank.
  void progress();
  /// Ends all messages with an error.
  void end(const std::exception_ptr& error);

  bool pending() const { return pending_ > 0; }
  std::shared_ptr<Task> first() const;
  /// Of a message; null for another call.
  const Lane* lane_of(const Task& task) const;
  const std::vector<Lane>& lanes() const { return lanes_; }
  /// Whether the first message of a lane cannot go on for want of the peer.
  bool lacks_peer(const Lane& lane) const;
  // For errors; empty where there is none.
  /// The peer's call that the message meets, once it is posted.
  std::string other_end(const Fingerprint& call) const;
  /// A call by the peer that waits for this rank.
  std::string awaited_by(int peer) const;

 private:
  struct Ends {
    ChannelEnd &mine, &theirs;
  };
  static std::size_t index(Operation operation, int peer);
  Ends ends(const Lane& lane) const;
  std::uint64_t movable(const Lane& lane) const;
  bool advance(Lane& lane);
  void post(const Lane& lane);
  void end_first(Lane& lane, std::exception_ptr error);

  const GroupSetup& setup_;
  const SharedMemory& memory_;
  int rank_;
  std::vector<Lane> lanes_;
  std::size_t pending_ = 0;  // messages of all lanes
};

}  // namespace tandem::parallel
