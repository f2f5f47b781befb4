#include <tandem/parallel/comm/secret.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <optional>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <tandem/parallel/comm/start_environment.h>
#include <tandem/tensor/error.h>

namespace tandem::parallel {
namespace {

constexpr const char* kSecret = "secret";
constexpr std::size_t kMaxFileBytes = 4096;

const unsigned char* bytes_of(std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); }

// OpenSSL would clean up when the process exits, while the thread of a StoreServer may still use it.
void keep_openssl() {
  static const int done = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  check(done == 1, kSecret, "this OpenSSL cannot be used");
}

void check_varies(const char* variable, std::string_view secret) {
  const bool varies = secret.find_first_not_of(secret.front()) != std::string_view::npos;
  check(varies, kSecret,
        "the secret of {} is one byte repeated, which anybody can guess; make one with: openssl rand -hex 32",
        variable);
}

std::string read_secret_file(const char* path) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  check(fd >= 0, kSecret, "{} names '{}', which cannot be opened: {}", kSecretFileVariable, path, std::strerror(errno));
  struct stat about {};
  const bool known = fstat(fd, &about) == 0;
  std::string text(kMaxFileBytes + 1, '\0');
  const ssize_t n = known && S_ISREG(about.st_mode) ? read(fd, text.data(), text.size()) : -1;
  close(fd);
  check(n >= 0, kSecret, "{} names '{}', which is no file that can be read", kSecretFileVariable, path);
  check(about.st_uid == geteuid() || about.st_uid == 0, kSecret,
        "the secret in '{}' belongs to another user ({}), who may read and change it; make a file of your own with: "
        "(umask 077; openssl rand -hex 32 > FILE)",
        path, static_cast<unsigned>(about.st_uid));
  check((about.st_mode & (S_IRWXG | S_IRWXO)) == 0, kSecret,
        "others than this user may read or write the secret in '{}'; protect it with: chmod 600 {}", path, path);
  text.resize(static_cast<std::size_t>(n));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  check(text.size() >= kSecretBytes && text.size() <= kMaxFileBytes, kSecret,
        "the secret in '{}' has {} bytes; it must have {} to {}; make one with: openssl rand -hex 32 > {}", path,
        text.size() > kMaxFileBytes ? static_cast<std::size_t>(about.st_size) : text.size(), kSecretBytes,
        kMaxFileBytes, path);
  check_varies(kSecretFileVariable, text);
  return text;
}

}  // namespace

std::string random_bytes() {
  keep_openssl();
  std::array<unsigned char, kSecretBytes> bytes{};
  check(RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) == 1, kSecret, "the system gives no random numbers");
  return {bytes.begin(), bytes.end()};
}

std::string secret_from_environment() {
  if (const std::optional<std::string> text = text_from_environment(kSecretVariable)) {
    const std::optional<std::string> secret = from_hex(*text);
    check(secret && secret->size() >= kSecretBytes && secret->size() <= kMaxFileBytes, kSecret,
          "{} is no secret: it must be {} or more hexadecimal digits, two for a byte", kSecretVariable,
          2 * kSecretBytes);
    check_varies(kSecretVariable, *secret);
    return *secret;
  }
  const std::optional<std::string> path = text_from_environment(kSecretFileVariable);
  return path ? read_secret_file(path->c_str()) : std::string();
}

std::optional<std::string> from_hex(std::string_view digits) {
  std::string bytes;
  if (digits.size() % 2 != 0) return std::nullopt;
  for (std::size_t i = 0; i < digits.size(); i += 2) {
    int value = 0;
    for (const char c : digits.substr(i, 2)) {
      const auto at =
          std::string_view("0123456789abcdef").find(static_cast<char>(std::tolower(static_cast<unsigned char>(c))));
      if (at == std::string_view::npos) return std::nullopt;
      value = 16 * value + static_cast<int>(at);
    }
    bytes += static_cast<char>(value);
  }
  return bytes;
}

std::string to_hex(std::string_view bytes) {
  std::string digits;
  for (const char c : bytes) digits += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return digits;
}

std::string proof(std::string_view secret, std::string_view text) {
  keep_openssl();
  std::array<unsigned char, EVP_MAX_MD_SIZE> result{};
  unsigned size = 0;
  const bool made = HMAC(EVP_sha256(), bytes_of(secret), static_cast<int>(secret.size()), bytes_of(text), text.size(),
                         result.data(), &size) != nullptr;
  check(made, kSecret, "HMAC-SHA256 cannot be computed by this OpenSSL");
  return {result.begin(), result.begin() + size};
}

bool equal_proofs(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace tandem::parallel
