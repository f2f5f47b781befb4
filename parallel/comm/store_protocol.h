// The messages between a TCPStore and its StoreServer. A message is a 4-byte length and so many bytes; numbers are
// little-endian. After the handshake (store_handshake.h) a connection carries one request at a time, and one reply to
// each; the first reply is to the greeting.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace tandem::parallel::store_protocol {

enum class Command : std::uint8_t {
  goodbye,  // the rank of this connection leaves as it should
  set,
  get,
  check,
  add,  // value = the amount, as text
  compare_set,
  remove,
  num_keys,
  count  // number of commands
};
struct Request {
  Command command = Command::goodbye;
  std::string key = {}, value = {}, expected = {};
};

enum class Status : std::uint8_t {
  ok,
  missing,  // no such key
  lost,     // value = the lost rank, a blank, and how it ended
  refused,  // value = why
  stale,    // value = text: the client belongs to an earlier start of the job
  count
};
struct Reply {
  Status status = Status::ok;
  std::string value = {};
};

/// A message with its length in front.
std::string encode(const Request& request);
std::string encode(const Reply& reply);
/// The message without its length. Throws Error when the bytes are none.
Request parse_request(std::string_view bytes);
Reply parse_reply(std::string_view bytes);

/// Cuts a stream of bytes into messages. Holds no more bytes than were given to it.
class MessageReader {
 public:
  void feed(std::span<const char> bytes) { buffer_.append(bytes.data(), bytes.size()); }
  /// The next whole message, without its length. Throws Error when its length is beyond the limits.
  std::optional<std::string> next();
  /// Whether more bytes wait than one message can have.
  bool overfull() const;

 private:
  std::string buffer_;
};

}  // namespace tandem::parallel::store_protocol
