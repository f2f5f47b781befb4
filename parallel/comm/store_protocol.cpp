#include <tandem/parallel/comm/store_protocol.h>

#include <tandem/parallel/comm/store_limits.h>
#include <tandem/tensor/error.h>

namespace tandem::parallel::store_protocol {
namespace {

constexpr std::size_t kLengthBytes = 4;
constexpr std::size_t kMaxMessage = 1 + 3 * kLengthBytes + kMaxKeyBytes + 2 * kMaxValueBytes;

void put_field(std::string& out, std::string_view field) {
  put_length(out, field.size());
  out += field;
}

std::string take_field(std::string_view& bytes, std::size_t limit) {
  check(bytes.size() >= kLengthBytes, "store", "a message ends within a length");
  const std::size_t length = read_length(bytes);
  bytes.remove_prefix(kLengthBytes);
  check(length <= limit && length <= bytes.size(), "store", "a field of a message has {} bytes; {} are left", length,
        bytes.size());
  std::string field(bytes.substr(0, length));
  bytes.remove_prefix(length);
  return field;
}

template <class Kind>
Kind take_kind(std::string_view& bytes) {
  check(!bytes.empty(), "store", "a message is empty");
  const auto value = static_cast<std::uint8_t>(bytes.front());
  check(value < static_cast<std::uint8_t>(Kind::count), "store", "a message of kind {} is unknown", value);
  bytes.remove_prefix(1);
  return static_cast<Kind>(value);
}

}  // namespace

std::string encode(const Request& r) {
  std::string out;
  put_length(out, 1 + 3 * kLengthBytes + r.key.size() + r.value.size() + r.expected.size());
  out += static_cast<char>(r.command);
  put_field(out, r.key);
  put_field(out, r.value);
  put_field(out, r.expected);
  return out;
}

std::string encode(const Reply& r) {
  std::string out;
  put_length(out, 1 + r.value.size());
  out += static_cast<char>(r.status);
  out += r.value;
  return out;
}

Request parse_request(std::string_view bytes) {
  Request r;
  r.command = take_kind<Command>(bytes);
  r.key = take_field(bytes, kMaxKeyBytes);
  r.value = take_field(bytes, kMaxValueBytes);
  r.expected = take_field(bytes, kMaxValueBytes);
  check(bytes.empty(), "store", "{} bytes follow a message", bytes.size());
  return r;
}

Reply parse_reply(std::string_view bytes) {
  Reply r;
  r.status = take_kind<Status>(bytes);
  check(bytes.size() <= kMaxValueBytes, "store", "a reply has {} bytes", bytes.size());
  r.value = bytes;
  return r;
}

std::optional<std::string> MessageReader::next() {
  if (buffer_.size() < kLengthBytes) return std::nullopt;
  const std::size_t length = read_length(buffer_);
  check(length <= kMaxMessage, "store", "a message has {} bytes; at most {} are allowed", length, kMaxMessage);
  if (buffer_.size() < kLengthBytes + length) return std::nullopt;
  std::string message = buffer_.substr(kLengthBytes, length);
  buffer_.erase(0, kLengthBytes + length);
  return message;
}

bool MessageReader::overfull() const { return buffer_.size() > kLengthBytes + kMaxMessage; }

}  // namespace tandem::parallel::store_protocol
