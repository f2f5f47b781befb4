// The JSON header of a safetensors file, apart from the bytes around it. The only part of Tandem that reads JSON.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <tandem/tensor/dtype.h>
#include <tandem/tensor/shape.h>

namespace tandem::safetensors {

/// Headers longer than this are refused, as the format's reference implementation does.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

/// One tensor of a file.
struct Entry {
  std::string name;
  DType dtype = float32;
  Shape shape;
  std::uint64_t begin = 0, end = 0;  // bytes of its values, counted from the end of the header
  std::uint64_t position = 0;        // where the header names it, in bytes from the start of the file
};
/// What a file says of its contents.
struct Header {
  std::vector<Entry> entries;  // in the order of the header
  std::map<std::string, std::string> metadata;
};

/// Reads a header that starts at byte 8 of `file` and is followed by `data_bytes` bytes. Throws Error with the file and
/// the byte offset unless all entries are well-formed and their bytes cover the data without gaps or overlaps.
Header parse_header(std::string_view json, std::uint64_t data_bytes, const std::string& file);
/// The JSON text; throws Error when a name is not UTF-8.
std::string format_header(const Header& header);
/// A name from a file for an error message: shortened, without control characters.
std::string shown(std::string_view name);

/// Throws Error: what is wrong at which byte of a file.
template <class... A>
[[noreturn]] void fail_at(const std::string& file, std::uint64_t byte, fmt::format_string<const A&...> message,
                          const A&... args) {
  fail("load", "{}, byte {}: {}; the file is damaged or not in the safetensors format: write it again", file, byte,
       fmt::format(message, args...));
}

}  // namespace tandem::safetensors
