// The memory that the ranks of a communicator share, be they threads or processes: an anonymous file of the process
// that made the unique id, found through /proc. It has no name, so nothing is left over however a process ends.
#pragma once
#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace cuda_double {

constexpr int kMaxRanks = 64;
constexpr size_t kChunk = 1 << 16;

/// What ranks must agree on before data moves.
struct Fingerprint {
  uint64_t sequence = 0, count = 0;
  int32_t kind = 0, type = 0, operation = 0, root = 0, windows = 0, unused = 0;
  bool operator==(const Fingerprint&) const = default;
};

/// What a rank hands to all in a collective.
struct Slot {
  Fingerprint fingerprint;
  char data[kChunk];
};

/// What one rank sends to another; its chunk is full or empty.
struct Mail {
  std::atomic<uint32_t> full;
  Fingerprint fingerprint;
  char data[kChunk];
};

class Segment {
 public:
  /// A new file and its id. It stays open in this process until a rank of it has started.
  static ncclResult_t make_id(ncclUniqueId* id);
  /// Joins, and waits for all others unless `stop` is set meanwhile. `host` and `device` must differ among ranks.
  static ncclResult_t join(const ncclUniqueId& id, int ranks, int rank, uint64_t host, int device,
                           const std::atomic<bool>& stop, std::unique_ptr<Segment>& joined);
  ~Segment();

  Slot& slot(int rank) const;
  Mail& mail(int from, int to) const;

  /// False where `stop` was set, or a rank failed, before all came.
  bool barrier(const std::atomic<bool>& stop);
  /// For mail: a number that changes whenever a chunk was filled or emptied.
  uint32_t activity() const;
  void announce();
  void wait_activity(uint32_t seen) const;
  /// Tells all ranks to give up.
  void fail();
  bool failed() const;
  /// Wakes the threads that wait here, so that they look at `stop`.
  void wake();

 private:
  struct Header;
  Segment(void* memory, size_t bytes, int ranks);
  static size_t bytes_for(int ranks);
  Header& header() const;

  void* memory_;
  size_t bytes_;
  int ranks_;
};

}  // namespace cuda_double
