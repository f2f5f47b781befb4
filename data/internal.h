// What the loader's threads and the stacking of examples share.
#pragma once
#include <cstdint>

namespace tandem::data::detail {

/// Thrown between two rows when the loader's user has left the loop; never reaches a user.
struct Stopped {};

/// Where the random numbers of a row start within its epoch's stream: rows lie 2^32 blocks apart.
inline std::uint64_t first_block(std::int64_t row) { return static_cast<std::uint64_t>(row) << 32; }

/// Philox streams of an epoch: those that shuffle, and those that examples draw from. manual_seed's lie below.
inline constexpr std::uint64_t kShuffleStreams = std::uint64_t{1} << 61;
inline constexpr std::uint64_t kExampleStreams = std::uint64_t{1} << 62;

}  // namespace tandem::data::detail
