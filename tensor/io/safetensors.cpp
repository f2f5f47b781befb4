// Layout: 8 bytes with the header's length, little-endian; the header, JSON padded with spaces; the tensors' bytes
// without gaps. Wide types are written first, so that every tensor is aligned to its element size.
#include <tandem/tensor/io/safetensors.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <system_error>
#include <unordered_set>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <tandem/tensor/callable.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/io/atomic_file.h>
#include <tandem/tensor/io/header.h>

namespace tandem {
namespace {

using namespace safetensors;
static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

// Bytes that can be read at any offset; `read` throws when it cannot give all that are asked for.
struct Source {
  const std::string& name;
  std::uint64_t size;
  FunctionRef<void(std::uint64_t offset, void* to, std::size_t bytes)> read;
};

void check_booleans(const Tensor& t, const std::string& file, std::uint64_t offset) {
  const auto* bytes = static_cast<const unsigned char*>(t.raw().data);
  for (int64_t i = 0; i < t.numel(); ++i)
    if (bytes[i] > 1)
      fail_at(file, offset + static_cast<std::uint64_t>(i), "a bool must be 0 or 1, but this byte is {}", bytes[i]);
}

Safetensors read_from(const Source& source, Device device) {
  check_exists("load", device);
  if (source.size < 8) fail_at(source.name, source.size, "the file ends before the 8 bytes of the header's length");
  std::uint64_t length = 0;
  source.read(0, &length, 8);
  if (length > source.size - 8)
    fail_at(source.name, 0, "the header's length is {}, but only {} bytes follow", length, source.size - 8);
  if (length > kMaxHeaderBytes)
    fail_at(source.name, 0, "the header's length is {}, but at most {} is allowed", length, kMaxHeaderBytes);
  std::string text(length, '\0');
  source.read(8, text.data(), length);
  Header header = parse_header(text, source.size - 8 - length, source.name);

  Safetensors out{{}, std::move(header.metadata)};
  for (Entry& entry : header.entries) {
    const std::uint64_t offset = 8 + length + entry.begin;
    Tensor t;
    try {
      t = empty(entry.shape, {.dtype = entry.dtype, .device = device.is_cpu() ? device : Device()});
    } catch (const Error& e) {
      fail("load", "{}, byte {}: there is no memory for {} of shape {}: {}", source.name, offset, shown(entry.name),
           entry.shape, e.what());
    }
    if (entry.end > entry.begin) source.read(offset, t.raw_for_write().data, entry.end - entry.begin);
    if (entry.dtype == boolean) check_booleans(t, source.name, offset);
    out.tensors.emplace_back(std::move(entry.name), t.to(device));
  }
  return out;
}

Safetensors read_bounded(const Source& source, Device device) {
  try {
    return read_from(source, device);
  } catch (const std::bad_alloc&) {
    fail("load", "{} has {} bytes, for which there is not enough memory; free some", source.name, source.size);
  }
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  operator int() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  Header header{{}, metadata};
  std::unordered_set<std::string> names;
  for (const auto& [name, t] : tensors) {
    check(t.defined(), "save", "the tensor {} is undefined; leave it out or assign a value", shown(name));
    check(name != "__metadata__", "save", "__metadata__ cannot be a tensor's name in this format; choose another");
    check(names.insert(name).second, "save", "two tensors have the name {}; names must be unique", shown(name));
    header.entries.push_back({.name = name, .dtype = t.dtype(), .shape = t.shape()});
  }
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return size_of(header.entries[a].dtype) > size_of(header.entries[b].dtype);
  });
  std::uint64_t end = 0;
  for (const std::size_t i : order) {
    Entry& entry = header.entries[i];
    entry.begin = end;
    end += static_cast<std::uint64_t>(entry.shape.numel()) * size_of(entry.dtype);
    entry.end = end;
  }
  std::string text = format_header(header);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  check(text.size() <= kMaxHeaderBytes, "save",
        "the names of {} tensors take {} bytes; the format allows {}: shorten them", tensors.size(), text.size(),
        kMaxHeaderBytes);

  AtomicFile file(path);
  const std::uint64_t length = text.size();
  file.write(&length, 8);
  file.write(text.data(), text.size());
  for (const std::size_t i : order) {
    Tensor host = tensors[i].second.detach();
    if (!host.device().is_cpu()) host = host.to(Device());
    host = host.contiguous();
    file.write(host.raw().data, static_cast<std::size_t>(host.numel()) * size_of(host.dtype()));
  }
  file.commit();
}

Safetensors read_safetensors(const std::string& path, Device device) {
  // O_NONBLOCK: opening a named pipe must not wait for its writer.
  const FileDescriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info {};
  const bool opened = fd >= 0 && fstat(fd, &info) == 0;
  check(opened, "load", "{} cannot be opened: {}; check the path", path, std::generic_category().message(errno));
  check(S_ISREG(info.st_mode), "load", "{} is not a regular file; give the path of a safetensors file", path);
  const auto read = [&](std::uint64_t offset, void* to, std::size_t bytes) {
    char* next = static_cast<char*>(to);
    while (bytes > 0) {
      const ssize_t got =
          pread(fd, next, std::min<std::size_t>(bytes, std::size_t{1} << 30), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      check(got >= 0, "load", "{}, byte {}: {}; check the disk", path, offset, std::generic_category().message(errno));
      check(got > 0, "load", "{}, byte {}: the file became shorter while it was read; do not change it meanwhile", path,
            offset);
      next += got;
      offset += static_cast<std::uint64_t>(got);
      bytes -= static_cast<std::size_t>(got);
    }
  };
  return read_bounded({path, static_cast<std::uint64_t>(info.st_size), read}, device);
}

Safetensors parse_safetensors(std::span<const std::byte> bytes, const std::string& name) {
  const auto read = [&](std::uint64_t offset, void* to, std::size_t count) {
    std::memcpy(to, bytes.data() + offset, count);
  };
  return read_bounded({name, bytes.size(), read}, {});
}

}  // namespace tandem
