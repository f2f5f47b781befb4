// The memory that the processes of one host share. The launcher makes it (an anonymous file that children inherit, so
// that nothing is left behind after any end), marks dead ranks in it, and the shm group works in it.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include <tandem/parallel/comm/collective.h>

namespace tandem::parallel {

inline constexpr int kMaxShmRanks = 64;
inline constexpr int kMaxShmGroups = 16;
inline constexpr std::size_t kShmSlotBytes = 4 << 20;  // for each rank; larger tensors go in pieces
inline constexpr const char* kShmVariable = "TANDEM_SHM_FD";

/// A meeting point of the ranks of one group.
struct ShmBarrier {
  std::atomic<std::uint32_t> arrived{0}, generation{0};
  std::atomic<std::uint32_t> visits[kMaxShmRanks] = {};  // how often each member has come here
  // Two sets, by turns: a fast rank may be one call ahead of one that still compares.
  alignas(64) Fingerprint fingerprints[2][kMaxShmRanks];
};

/// What the ranks share at the start of the segment.
struct ShmHeader {
  std::uint32_t world_size = 0;
  std::atomic<std::int32_t> dead_rank{-1};   // the first rank that ended before the others
  std::atomic<std::int32_t> dead_status{0};  // its wait status
  ShmBarrier barriers[kMaxShmGroups];
};

constexpr std::size_t shm_bytes(int world_size) {
  return ((sizeof(ShmHeader) + 4095) & ~std::size_t{4095}) + static_cast<std::size_t>(world_size) * kShmSlotBytes;
}

/// Makes the segment and returns its file descriptor, inherited by children; throws Error when memory is short.
int create_shm_segment(int world_size);
/// Maps a segment; throws Error when the descriptor is not one for `world_size` ranks. The mapping lasts until the end
/// of the process.
ShmHeader* map_shm_segment(int fd, int world_size);

}  // namespace tandem::parallel
