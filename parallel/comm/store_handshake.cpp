#include <tandem/parallel/comm/store_handshake.h>

#include <unistd.h>

#include <tandem/parallel/comm/secret.h>
#include <tandem/parallel/comm/store_limits.h>

namespace tandem::parallel::store_protocol {
namespace {

constexpr std::size_t kBodyBytes = kGreetingBytes - kProofBytes;
static_assert(kSecretBytes == kNonceBytes);  // what random_bytes gives

std::string proof_of(std::string_view side, std::string_view body, std::string_view secret, std::string_view nonce) {
  // The key has one length: HMAC itself would take a secret of zeros for none.
  return proof(proof("tandem store", secret), std::string(side).append(nonce).append(body));
}

void put_number(std::string& out, int value) { put_length(out, static_cast<std::uint32_t>(value)); }
int take_number(std::string_view& bytes) {
  const auto value = static_cast<std::int32_t>(read_length(bytes));
  bytes.remove_prefix(sizeof value);
  return value;
}

}  // namespace

std::string process_token() {
  static const std::string random = random_bytes();
  std::string token;
  put_length(token, static_cast<std::uint32_t>(getpid()));
  return token + random.substr(0, kTokenBytes - token.size());
}

std::string make_greeting(const Identity& who, std::string_view secret, std::string_view server_nonce) {
  std::string greeting(kGreetingName);
  greeting += random_bytes();
  for (const int number : {who.rank, who.world_size, who.restart}) put_number(greeting, number);
  greeting += who.token;
  return greeting + proof_of("client", greeting, secret, server_nonce);
}

std::optional<Identity> read_greeting(std::string_view bytes, std::string_view secret, std::string_view server_nonce) {
  if (bytes.size() != kGreetingBytes || !bytes.starts_with(kGreetingName)) return std::nullopt;
  const std::string_view body = bytes.substr(0, kBodyBytes);
  if (!equal_proofs(bytes.substr(kBodyBytes), proof_of("client", body, secret, server_nonce))) return std::nullopt;
  std::string_view fields = body.substr(kGreetingName.size() + kNonceBytes);
  Identity who;
  for (int* number : {&who.rank, &who.world_size, &who.restart}) *number = take_number(fields);
  who.token = fields;
  return who;
}

std::string answer_to(std::string_view greeting, std::string_view secret, std::string_view server_nonce) {
  return proof_of("server", greeting.substr(0, kBodyBytes), secret, server_nonce);
}

}  // namespace tandem::parallel::store_protocol
