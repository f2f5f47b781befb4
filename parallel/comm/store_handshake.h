// The handshake at the beginning of each connection to a StoreServer, by which both sides prove that they know the
// job's secret. The server sends a nonce; the client sends its greeting, of which the last part is its proof; the
// server sends its own proof, and a reply. All but the reply have fixed lengths, and nothing else is said before the
// proofs.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tandem::parallel::store_protocol {

inline constexpr std::size_t kNonceBytes = 32, kProofBytes = 32, kTokenBytes = 16;

/// Who a client is.
struct Identity {
  int rank = -1;           // whose presence the connection stands for, or -1
  int world_size = -1;     // that the client was told, or -1
  int restart = -1;        // the start of the job that it belongs to; -1 for launchers, which belong to all
  std::string token = {};  // of its process: kTokenBytes
};
/// The name, the client's nonce, the numbers of 4 bytes each, the token and the proof.
inline constexpr std::string_view kGreetingName = "tandem store 03\n";
inline constexpr std::size_t kGreetingBytes =
    kGreetingName.size() + kNonceBytes + 3 * sizeof(std::int32_t) + kTokenBytes + kProofBytes;

/// Different in each process, also in a fork.
std::string process_token();
/// What a client answers to the server's nonce, with a fresh nonce of its own.
std::string make_greeting(const Identity& who, std::string_view secret, std::string_view server_nonce);
/// Who has sent these bytes; null when they are no greeting, or when the sender does not know the secret.
std::optional<Identity> read_greeting(std::string_view bytes, std::string_view secret, std::string_view server_nonce);
/// The server's proof, kProofBytes, in answer to a greeting.
std::string answer_to(std::string_view greeting, std::string_view secret, std::string_view server_nonce);

}  // namespace tandem::parallel::store_protocol
