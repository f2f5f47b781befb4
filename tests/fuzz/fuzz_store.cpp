// Fuzzes the store's protocol, and the records of its file: any bytes, in any pieces, give messages or an Error; what
// is read is written the same.
#include <tandem/parallel/comm/file_records.h>
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
    std::string_view rest(bytes.data(), size);
    while (const auto record = tandem::parallel::first_record(rest)) {
      std::string again;
      tandem::parallel::append_record(again, *record);
      if (again != rest.substr(0, record->bytes())) __builtin_trap();
      rest.remove_prefix(record->bytes());
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
