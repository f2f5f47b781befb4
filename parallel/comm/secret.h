// The secret of a job, and how a process proves that it knows it.
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace tandem::parallel {

inline constexpr std::size_t kSecretBytes = 32;
/// What a launcher gives its ranks: the secret as 64 hexadecimal digits.
inline constexpr const char* kSecretVariable = "TANDEM_SECRET";
/// The file that holds the secret, in any form of at least kSecretBytes bytes, which only its owner may read.
inline constexpr const char* kSecretFileVariable = "TANDEM_SECRET_FILE";

/// 32 random bytes from the system.
std::string random_bytes();
/// The secret that the environment tells, from TANDEM_SECRET or TANDEM_SECRET_FILE; empty when there is none. Error
/// when it cannot be read, is too short, or when others than the owner may read the file.
std::string secret_from_environment();
/// As text for kSecretVariable.
std::string to_hex(std::string_view bytes);
/// The bytes of such a text; null when it is none.
std::optional<std::string> from_hex(std::string_view digits);
/// HMAC-SHA256 (RFC 2104) of a text with the secret as key: 32 bytes.
std::string proof(std::string_view secret, std::string_view text);
/// Compares in a time that does not depend on where the texts differ.
bool equal_proofs(std::string_view a, std::string_view b);

}  // namespace tandem::parallel
