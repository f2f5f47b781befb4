// The records of a FileStore's file: the kind ('+' sets, '-' removes), the lengths of key and value (4 bytes each,
// little-endian), key and value.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include <tandem/parallel/comm/store_limits.h>

namespace tandem::parallel {

inline constexpr std::size_t kRecordHeaderBytes = 9;
inline constexpr std::size_t kMaxRecordBytes = kRecordHeaderBytes + kMaxKeyBytes + kMaxValueBytes;

struct FileRecord {
  char kind = '+';
  std::string_view key = {}, value = {};
  std::size_t bytes() const { return kRecordHeaderBytes + key.size() + value.size(); }
};

/// The record at the beginning of `bytes`, into which it points; null when its end is missing. Throws Error when there
/// is no record.
std::optional<FileRecord> first_record(std::string_view bytes);
void append_record(std::string& out, const FileRecord& record);

}  // namespace tandem::parallel
