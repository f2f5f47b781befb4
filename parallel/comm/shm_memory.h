// The two kinds of memory that the ranks of a host share: that of a process whose threads they are, and segments that
// several processes map.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/comm/shm_board.h>
#include <tandem/parallel/comm/shm_segment.h>
#include <tandem/tensor/callable.h>

namespace tandem::parallel {

/// What the ranks of a group reach together, as one of them sees it.
class SharedMemory {
 public:
  virtual ~SharedMemory() = default;
  Bell& bell() const { return board_->bell; }
  Member& member(int i) const { return reinterpret_cast<Member*>(board_ + 1)[i]; }
  Channel& channel(int from, int to) const;
  char* ring(int from, int to) const { return reinterpret_cast<char*>(&channel(from, to) + 1); }
  std::size_t ring_bytes() const { return ring_bytes_; }
  /// Where the others find data of this rank; nowhere when they cannot reach it.
  virtual Location place_of(const void* data, std::size_t bytes) const = 0;
  /// A place in the memory of a rank as an address in this one's.
  virtual char* address(int member, Location place) const = 0;
  /// Room for pieces of what the others cannot reach: two for each rank, of kPieceBytes.
  virtual char* piece(int member, std::size_t which) const = 0;
  /// Whether a rank has ended, as far as the system tells.
  virtual bool ended(int member) const = 0;
  /// Returns when no other rank is inside a step. Steps are short, but a process can end in one, or be stopped: then,
  /// or after a second, returns all the same, and what it was writing may still change.
  virtual void wait_until_others_outside() const = 0;
  /// To be called when all ranks have come: what only helped them find each other goes.
  virtual void all_came() = 0;

 protected:
  explicit SharedMemory(const GroupSetup& setup);
  std::size_t members() const { return setup_.ranks.size(); }
  bool other_is_inside(std::size_t i) const { return i != rank_ && member(static_cast<int>(i)).inside.load(); }
  // Whether a launcher, or spawn_threads, has said that a rank has ended.
  bool said_to_have_ended(int member) const;
  static std::size_t board_bytes(std::size_t members);
  static void make_board(void* at, std::size_t members);
  GroupSetup setup_;
  std::size_t rank_ = 0;  // of this rank in the group
  std::size_t ring_bytes_ = 0;
  Board* board_ = nullptr;
};

/// Threads reach everything.
class ThreadMemory final : public SharedMemory {
 public:
  explicit ThreadMemory(const GroupSetup& setup);
  Location place_of(const void* data, std::size_t bytes) const override;
  char* address(int member, Location place) const override;
  char* piece(int member, std::size_t which) const override;
  bool ended(int member) const override;
  void wait_until_others_outside() const override;
  void all_came() override;

 private:
  struct Block;
  std::shared_ptr<Block> block_;
};

/// Processes reach the group's segment, and the allocations that are added later.
class ProcessMemory final : public SharedMemory {
 public:
  static constexpr std::size_t kPieceBytes = 256 << 10;
  /// Every member makes it, and calls `meanwhile` while it waits for the others. Throws Error on each when they do not
  /// share a host or memory is short. A rank that alone cannot map it throws alone, and is missing for the others.
  ProcessMemory(const GroupSetup& setup, FunctionRef<void()> meanwhile);
  Location place_of(const void* data, std::size_t bytes) const override;
  char* address(int member, Location place) const override;
  char* piece(int member, std::size_t which) const override;
  bool ended(int member) const override;
  void wait_until_others_outside() const override;
  void all_came() override;
  /// Adds memory that has `stride` bytes for each rank, one after the other. Every rank adds and removes the same.
  void add(std::shared_ptr<Mapping> mapping, std::size_t stride);
  /// For each allocation, whether this rank still has tensors in it.
  std::vector<bool> used() const;
  /// Unmaps the allocations for which `used` is false: those that no rank uses.
  void remove_unused(const std::vector<bool>& used);

 private:
  struct Allocation {
    std::shared_ptr<Mapping> mapping;
    std::size_t stride = 0;
  };
  char* room(int member) const;

  FileDescriptor file_;
  Mapping segment_;
  std::vector<std::shared_ptr<FileDescriptor>> processes_;  // of the members, as pidfd
  std::vector<Allocation> allocations_;
};

}  // namespace tandem::parallel
