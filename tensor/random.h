// Random numbers: counter-based (Philox 4x32-10), so that element i of a draw depends on seed, stream and position
// only.
#pragma once
#include <cstdint>
#include <vector>

#include <tandem/tensor/callable.h>
#include <tandem/tensor/compiler.h>

namespace tandem {

/// Seeds every stream and starts each at its beginning.
void manual_seed(std::uint64_t seed);

/// The seed, and how far each stream has been used. Saved in checkpoints.
struct RandomState {
  std::uint64_t seed = 0;
  std::vector<std::uint64_t> positions;  // one per stream
};
RandomState random_state();
void set_random_state(const RandomState& state);

/// Where a draw of `blocks` blocks of four 32-bit numbers starts, in the calling thread's RandomScope or else stream;
/// moves it on.
struct PhiloxKey {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
  std::uint64_t block = 0;
};
PhiloxKey draw(std::uint64_t blocks);
/// For a draw of `blocks` that the calling thread has just made for a graph, where it is not executed: gives the blocks
/// back to their stream. The result is called before each replay and draws as many from the same stream. Throws Error
/// inside a RandomScope, whose numbers are used up when it ends.
UniqueFunction<PhiloxKey()> repeat_draw(const PhiloxKey& drawn, std::uint64_t blocks);

/// Makes the calling thread draw from another stream until it is destroyed. Replica i of a data-parallel model and
/// rank i of a distributed one use stream i, so that their numbers do not depend on which thread runs when.
class RandomStream {
 public:
  explicit RandomStream(int stream);
  ~RandomStream();
  RandomStream(const RandomStream&) = delete;
  RandomStream& operator=(const RandomStream&) = delete;
  /// The calling thread's stream.
  static int current();

 private:
  int previous_;
};
inline constexpr int kMaxStreams = 4096;

/// Makes the calling thread draw from `start` on, whatever its stream and the global seed, until it is destroyed. Keys
/// with streams below kMaxStreams are those of manual_seed.
class RandomScope {
 public:
  explicit RandomScope(const PhiloxKey& start);
  ~RandomScope();
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;
  /// Where the calling thread's innermost scope draws next, for reading and for moving; null outside any scope.
  static PhiloxKey* current();

 private:
  PhiloxKey key_;
  PhiloxKey* previous_;
};

/// Four 32-bit numbers of block `key.block + i` (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
struct Philox4 {
  std::uint32_t x[4];
};
TANDEM_HD inline Philox4 philox(const PhiloxKey& key, std::uint64_t i) {
  const std::uint64_t block = key.block + i;
  std::uint32_t c0 = static_cast<std::uint32_t>(block), c1 = static_cast<std::uint32_t>(block >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(key.stream), c3 = static_cast<std::uint32_t>(key.stream >> 32);
  std::uint32_t k0 = static_cast<std::uint32_t>(key.seed), k1 = static_cast<std::uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0, p1 = std::uint64_t{0xCD9E8D57u} * c2;
    const std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const std::uint32_t n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace tandem
