// What the stores have in common: limits, the keys that mean something, and how numbers are kept.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tandem::parallel {

inline constexpr std::size_t kMaxKeyBytes = 1024;
inline constexpr std::size_t kMaxValueBytes = 8 << 20;
inline constexpr std::size_t kMaxStoreBytes = 256 << 20;  // of all keys and values together

inline constexpr std::size_t kMaxConnections = 4096;  // of one server, that have proved the secret
inline constexpr std::size_t kMaxUnproved = 256;      // when one more comes, the oldest of them ends
inline constexpr double kProofSeconds = 5;            // that a connection has to prove the secret

/// Of the keys of launchers: they are kept over a restart, and waits for them do not end when a rank is lost.
inline constexpr std::string_view kLauncherPrefix = "launcher/";
/// There while no launcher of that node is connected, once one was.
std::string launcher_ended_key(int node);
/// Of the keys that say how a rank has ended.
inline constexpr std::string_view kEndedPrefix = "ended/";
inline std::string ended_key(int rank) { return std::string(kEndedPrefix) + std::to_string(rank); }
/// Their value for a rank that has said goodbye, and is not lost.
inline constexpr std::string_view kHasLeft = "has left the job";
/// Whether a rank that has ended so had done its part: it has left, or a launcher has seen no error.
inline bool ended_well(std::string_view how) { return how == kHasLeft || how == "ended with exit code 0"; }

/// Appends 4 bytes, little-endian.
void put_length(std::string& out, std::size_t length);
/// Reads them from the first 4 bytes.
std::size_t read_length(std::string_view bytes);

/// A timeout in seconds as it can be used: at most ten years. Throws Error when it is not positive.
double usable_timeout(const char* op, double seconds);
/// Throws Error when a key is empty or too long, or a value too large.
void check_sizes(std::string_view key, std::string_view value);
/// The bytes of keys and values in a store of `bytes` after `added` have come in place of `removed`. Throws Error when
/// the store is full.
std::size_t check_room(std::size_t bytes, std::size_t removed, std::size_t added);
/// Throws Error in a fork of the process that made the store: the two would take each other's answers and locks.
void check_process(int made_in);
/// The number that a value is, plus `amount`. Throws Error when the value is no number or the sum is out of range.
std::int64_t add_to(std::string_view key, std::string_view value, std::int64_t amount);
/// A key as it can be shown in a message.
std::string printable(std::string_view key);
/// "rank 1 of 4: ", or nothing for a client that is no rank.
std::string who(int rank, int world_size);

}  // namespace tandem::parallel
