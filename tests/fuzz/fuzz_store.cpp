// Fuzzes the store's protocol: any bytes, in any pieces, give messages or an Error; what is read is written the same.
#include <tandem/parallel/comm/store_protocol.h>
#include <tandem/tensor/error.h>

using namespace tandem::parallel::store_protocol;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const char> bytes(reinterpret_cast<const char*>(data), size);
  const std::size_t piece = size == 0 ? 1 : 1 + data[0] % 32;
  try {
    MessageReader reader;
    for (std::size_t at = 0; at < size; at += piece) {
      reader.feed(bytes.subspan(at, std::min(piece, size - at)));
      while (const auto message = reader.next()) {
        const Request request = parse_request(*message);
        if (encode(request).substr(4) != *message) __builtin_trap();
      }
    }
  } catch (const tandem::Error&) {
  }
  try {
    const Reply reply = parse_reply({bytes.data(), size});
    if (encode(reply).substr(4) != std::string_view(bytes.data(), size)) __builtin_trap();
  } catch (const tandem::Error&) {
  }
  return 0;
}
