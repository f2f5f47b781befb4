#include <tandem/parallel/comm/shm_messages.h>

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <tandem/parallel/comm/clock.h>
#include <tandem/parallel/comm/peer_errors.h>

namespace tandem::parallel {
namespace {

constexpr std::uint64_t kPieceBytes = 32 << 10;  // copied at a time, so that both sides copy at once

std::uint64_t bytes_of(const Fingerprint& call) {
  return static_cast<std::uint64_t>(call.count) * size_of(static_cast<DType>(call.dtype));
}

// Whether a send and a recv mean the same data.
bool agree(Fingerprint a, const Fingerprint& b) {
  a.operation = b.operation;
  a.root = b.root;
  return a == b;
}

}  // namespace

Messages::Messages(const GroupSetup& setup, const SharedMemory& memory)
    : setup_(setup), memory_(memory), rank_(setup.place()) {
  for (int peer = 0; peer < static_cast<int>(setup.ranks.size()); ++peer)
    for (const bool sends : {false, true}) lanes_.push_back({.peer = peer, .sends = sends});
}

std::size_t Messages::index(Operation operation, int peer) {
  return 2 * static_cast<std::size_t>(peer) + (operation == Operation::send ? 1 : 0);
}

std::shared_ptr<Task> Messages::start(std::shared_ptr<Engine> engine, const Collective& message) {
  Lane& lane = lanes_[index(message.operation, message.root)];
  auto task = std::make_shared<Task>(std::move(engine), message, fingerprint(message, ++lane.started));
  lane.tasks.push_back(task);
  ++pending_;
  return task;
}

const Messages::Lane* Messages::lane_of(const Task& task) const {
  const auto operation = static_cast<Operation>(task.call.operation);
  return is_message(operation) ? &lanes_[index(operation, task.call.root)] : nullptr;
}

// The lanes take turns, so that a large message does not hold up the others.
void Messages::progress() {
  for (bool moved = pending_ > 0; moved;) {
    moved = false;
    for (Lane& lane : lanes_) {
      if (lane.tasks.empty()) continue;
      if (advance(lane)) {
        lane.stalled_since = 0;
        moved = true;
      } else if (lane.stalled_since == 0) {
        lane.stalled_since = clock_seconds();
      }
    }
  }
}

Messages::Ends Messages::ends(const Lane& lane) const {
  Channel& c = lane.sends ? memory_.channel(rank_, lane.peer) : memory_.channel(lane.peer, rank_);
  return lane.sends ? Ends{c.sender, c.receiver} : Ends{c.receiver, c.sender};
}

// Bytes that fit into the ring, or are in it.
std::uint64_t Messages::movable(const Lane& lane) const {
  const auto [mine, theirs] = ends(lane);
  return lane.sends ? memory_.ring_bytes() - (mine.moved.load() - theirs.moved.load())
                    : theirs.moved.load() - mine.moved.load();
}

bool Messages::lacks_peer(const Lane& lane) const {
  if (ends(lane).theirs.posted.load() < lane.tasks.front()->call.sequence) return true;
  return lane.agreed && movable(lane) == 0;
}

// Tells the peer of the first message, if it does not know.
void Messages::post(const Lane& lane) {
  Task& task = *lane.tasks.front();
  ChannelEnd& mine = ends(lane).mine;
  if (mine.posted.load() >= task.call.sequence) return;
  task.collective.make_dense();
  mine.calls[task.call.sequence % 2] = task.call;
  mine.posted.store(task.call.sequence);
  memory_.bell().ring();
}

// Moves some bytes of the first message, or ends it; false when the peer must do something first.
bool Messages::advance(Lane& lane) {
  post(lane);
  if (lacks_peer(lane)) return false;
  const Task& task = *lane.tasks.front();
  const auto [mine, theirs] = ends(lane);
  if (!lane.agreed) {
    const Fingerprint& their_call = theirs.calls[task.call.sequence % 2];
    if (!agree(task.call, their_call)) {
      end_first(lane, std::make_exception_ptr(messages_differ({setup_, task.call}, lane.peer, their_call)));
      return true;
    }
    lane.agreed = true;
  }
  const std::uint64_t bytes = bytes_of(task.call), capacity = memory_.ring_bytes();
  const std::uint64_t at = mine.moved.load(), in_ring = at % capacity;
  const std::uint64_t count =
      std::min({movable(lane), bytes - lane.moved, kPieceBytes, capacity / 4, capacity - in_ring});
  if (count > 0) {
    char* const ring = memory_.ring(lane.sends ? rank_ : lane.peer, lane.sends ? lane.peer : rank_) + in_ring;
    if (lane.sends)
      std::memcpy(ring, static_cast<const char*>(task.collective.input.raw().data) + lane.moved, count);
    else
      std::memcpy(static_cast<char*>(task.collective.output.raw().data) + lane.moved, ring, count);
    mine.moved.store(at + count);
    lane.moved += count;
    memory_.bell().ring();
  }
  if (lane.moved == bytes) end_first(lane, nullptr);
  return true;
}

void Messages::end_first(Lane& lane, std::exception_ptr error) {
  const std::shared_ptr<Task> task = std::move(lane.tasks.front());
  lane.tasks.pop_front();
  lane.agreed = false;
  lane.moved = 0;
  --pending_;
  task->end(std::move(error));
}

void Messages::end(const std::exception_ptr& error) {
  for (Lane& lane : lanes_)
    while (!lane.tasks.empty()) end_first(lane, error);
}

std::shared_ptr<Task> Messages::first() const {
  for (const Lane& lane : lanes_)
    if (!lane.tasks.empty()) return lane.tasks.front();
  return nullptr;
}

std::string Messages::other_end(const Fingerprint& call) const {
  const ChannelEnd& theirs = ends(lanes_[index(static_cast<Operation>(call.operation), call.root)]).theirs;
  return theirs.posted.load() >= call.sequence ? describe(theirs.calls[call.sequence % 2]) : "";
}

std::string Messages::awaited_by(int peer) const {
  for (const bool sends : {false, true}) {
    const auto [mine, theirs] = ends({.peer = peer, .sends = sends});
    const std::uint64_t posted = theirs.posted.load();
    if (posted > mine.posted.load()) return describe(theirs.calls[posted % 2]);
  }
  return "";
}

}  // namespace tandem::parallel
