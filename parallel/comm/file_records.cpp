#include <tandem/parallel/comm/file_records.h>

#include <tandem/tensor/error.h>

namespace tandem::parallel {

std::optional<FileRecord> first_record(std::string_view bytes) {
  if (bytes.size() < kRecordHeaderBytes) return std::nullopt;
  const std::size_t key = read_length(bytes.substr(1)), value = read_length(bytes.substr(5));
  check((bytes[0] == '+' || bytes[0] == '-') && key > 0 && key <= kMaxKeyBytes && value <= kMaxValueBytes, "store",
        "these bytes are no record");
  if (bytes.size() < kRecordHeaderBytes + key + value) return std::nullopt;
  return FileRecord{bytes[0], bytes.substr(kRecordHeaderBytes, key), bytes.substr(kRecordHeaderBytes + key, value)};
}

void append_record(std::string& out, const FileRecord& record) {
  out += record.kind;
  put_length(out, record.key.size());
  put_length(out, record.value.size());
  out.append(record.key).append(record.value);
}

}  // namespace tandem::parallel
