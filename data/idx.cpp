// The IDX reader: a source of stored bytes, a reader that decompresses, and a parser that trusts no size in a header.
#include <tandem/data/idx.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <tandem/tensor/create.h>

#if defined(TANDEM_ZLIB)
#define ZLIB_CONST
#include <zlib.h>
#endif

namespace tandem::data {
namespace {

constexpr std::size_t kChunk = std::size_t{256} << 10;
constexpr std::uint8_t kUnsignedByte = 0x08;

// Bytes as they are stored, a chunk at a time.
struct Source {
  virtual ~Source() = default;
  // The next bytes, valid until the next call; none at the end.
  virtual std::span<const std::uint8_t> next() = 0;
};

class MemorySource final : public Source {
 public:
  explicit MemorySource(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}
  std::span<const std::uint8_t> next() override { return std::exchange(bytes_, {}); }

 private:
  std::span<const std::uint8_t> bytes_;
};

class FileSource final : public Source {
 public:
  explicit FileSource(const std::string& path) : path_(path), file_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    check(file_ >= 0, "read_idx", "{} cannot be opened: {}; check the path and its permissions", path,
          std::strerror(errno));
  }
  ~FileSource() override { close(file_); }
  FileSource(const FileSource&) = delete;
  FileSource& operator=(const FileSource&) = delete;

  std::span<const std::uint8_t> next() override {
    std::size_t filled = 0;
    while (filled < kChunk) {
      const ssize_t got = read(file_, buffer_.data() + filled, kChunk - filled);
      if (got < 0 && errno == EINTR) continue;
      check(got >= 0, "read_idx", "{} cannot be read at byte {}: {}; check that it is a file on a sound disk", path_,
            offset_ + filled, std::strerror(errno));
      if (got == 0) break;
      filled += static_cast<std::size_t>(got);
    }
    offset_ += filled;
    return std::span(buffer_).first(filled);
  }

 private:
  const std::string& path_;
  int file_;
  std::uint64_t offset_ = 0;
  std::vector<std::uint8_t> buffer_ = std::vector<std::uint8_t>(kChunk);
};

// The contents of a source, decompressed when it starts as gzip does.
class Reader {
 public:
  Reader(Source& source, std::string_view path) : source_(source), path_(path), input_(source.next()) {
    if (input_.size() < 2 || input_[0] != 0x1f || input_[1] != 0x8b) return;
    compressed_ = true;
#if defined(TANDEM_ZLIB)
    check(inflateInit2(&stream_, 16 + MAX_WBITS) == Z_OK, "read_idx", "{}: zlib has no memory to start; free some",
          path);
#else
    fail("read_idx",
         "{} is compressed by gzip, and this build has no zlib; unpack it with gunzip, or build Tandem with "
         "zlib1g-dev installed",
         path);
#endif
  }
  ~Reader() {
#if defined(TANDEM_ZLIB)
    if (compressed_) inflateEnd(&stream_);
#endif
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // Fills `out` as far as the contents go; returns the number of bytes.
  std::size_t read(std::span<std::uint8_t> out) {
    std::size_t filled = 0;
    while (filled < out.size() && refill())
      filled += compressed_ ? inflate_into(out.subspan(filled)) : copy_into(out.subspan(filled));
    return filled;
  }

 private:
  // Whether there is more input.
  bool refill() {
    if (input_.empty()) input_ = source_.next();
    if (!input_.empty()) return true;
    check(!compressed_ || between_members_, "read_idx",
          "{}: the gzip data breaks off at byte {}, before its end mark; get the file again", path_, consumed_);
    return false;
  }

  void consume(std::size_t count) {
    input_ = input_.subspan(count);
    consumed_ += count;
  }

  std::size_t copy_into(std::span<std::uint8_t> out) {
    const std::size_t count = std::min(out.size(), input_.size());
    std::copy_n(input_.begin(), count, out.begin());
    consume(count);
    return count;
  }

#if defined(TANDEM_ZLIB)
  std::size_t inflate_into(std::span<std::uint8_t> out) {
    if (between_members_) inflateReset(&stream_);        // a gzip file may consist of several
    constexpr std::size_t kMost = std::size_t{1} << 30;  // zlib counts in 32 bits
    const auto in_size = static_cast<uInt>(std::min(input_.size(), kMost));
    const auto out_size = static_cast<uInt>(std::min(out.size(), kMost));
    stream_.next_in = input_.data();
    stream_.avail_in = in_size;
    stream_.next_out = out.data();
    stream_.avail_out = out_size;
    const int status = inflate(&stream_, Z_NO_FLUSH);
    consume(in_size - stream_.avail_in);
    check(status == Z_OK || status == Z_STREAM_END || status == Z_BUF_ERROR, "read_idx",
          "{}: the gzip data is damaged at byte {} ({}); get the file again", path_, consumed_,
          stream_.msg != nullptr ? stream_.msg : "no more is known");
    between_members_ = status == Z_STREAM_END;
    return out_size - stream_.avail_out;
  }
  z_stream stream_{};
#else
  std::size_t inflate_into(std::span<std::uint8_t>) { return 0; }
#endif

  Source& source_;
  std::string_view path_;
  std::span<const std::uint8_t> input_;
  std::uint64_t consumed_ = 0;
  bool compressed_ = false;
  bool between_members_ = false;
};

struct Free {
  void operator()(std::uint8_t* data) const { std::free(data); }
};

Shape read_header(Reader& reader, std::string_view path, std::size_t* header_bytes) {
  std::uint8_t magic[4] = {};
  const std::size_t got = reader.read(magic);
  check(got == 4, "read_idx",
        "{} ends at byte {} within the magic number: expected 4 bytes, found {}; get the file again", path, got, got);
  check(magic[0] == 0 && magic[1] == 0, "read_idx",
        "{} is no IDX file: expected 00 00 at byte 0, found {:02x} {:02x}; give a file such as train-images-idx3-ubyte",
        path, magic[0], magic[1]);
  check(magic[2] == kUnsignedByte, "read_idx",
        "{} holds elements of type 0x{:02x} (byte 2); only unsigned bytes, 0x08, can be read", path, magic[2]);
  check(magic[3] >= 1 && magic[3] <= kMaxDims, "read_idx", "{} has {} dimensions (byte 3); expected 1 to {}", path,
        magic[3], kMaxDims);
  std::uint8_t sizes[4 * kMaxDims] = {};
  const std::size_t size_bytes = std::size_t{4} * magic[3];
  const std::size_t found = reader.read(std::span(sizes).first(size_bytes));
  *header_bytes = 4 + size_bytes;
  check(found == size_bytes, "read_idx",
        "{} ends at byte {} within its header: expected {} bytes, found {}; get the file again", path, 4 + found,
        4 + size_bytes, 4 + found);
  Shape shape;
  int64_t count = 1;
  bool overflow = false;
  for (std::size_t i = 0; i < magic[3]; ++i) {
    const std::uint8_t* p = sizes + 4 * i;
    const int64_t size = int64_t{p[0]} << 24 | int64_t{p[1]} << 16 | int64_t{p[2]} << 8 | int64_t{p[3]};
    shape.push_back(size);
    overflow |= __builtin_mul_overflow(count, std::max<int64_t>(size, 1), &count);
  }
  check(!overflow, "read_idx", "{} claims the impossible shape {} (bytes 4 to {}); get the file again", path, shape,
        3 + size_bytes);
  return shape;
}

Tensor read_idx(Source& source, std::string_view path) {
  Reader reader(source, path);
  std::size_t header = 0;
  const Shape shape = read_header(reader, path, &header);
  const auto expected = static_cast<std::size_t>(shape.numel());

  // The buffer doubles as it fills, so that a header alone cannot ask for memory. For large blocks realloc moves pages
  // instead of copying them.
  std::unique_ptr<std::uint8_t, Free> bytes;
  std::size_t capacity = 0, filled = 0;
  while (filled < expected) {
    capacity = std::min(expected, std::max(kChunk, 2 * capacity));
    auto* grown = static_cast<std::uint8_t*>(std::realloc(bytes.get(), capacity));
    check(grown != nullptr, "read_idx", "{}: no memory for {} bytes; free some", path, capacity);
    (void)bytes.release();
    bytes.reset(grown);
    filled += reader.read(std::span(grown + filled, capacity - filled));
    check(filled == capacity, "read_idx",
          "{} ends at byte {}: its header promises {} and so {} bytes, found {}; get the file again", path,
          header + filled, shape, header + expected, header + filled);
  }
  std::uint8_t rest[4096];
  const std::size_t extra = reader.read(rest);
  check(extra == 0, "read_idx",
        "{} goes on at byte {}: its header promises {} and so {} bytes, found at least {}; get the file again", path,
        header + expected, shape, header + expected, header + expected + extra);

  if (expected == 0) return empty(shape, {.dtype = uint8});
  std::shared_ptr<std::uint8_t> owner = std::move(bytes);
  auto storage = std::make_shared<Storage>(owner.get(), expected, Device(), owner);
  return make_view(std::move(storage), 0, shape, contiguous_strides(shape), uint8);
}

}  // namespace

Tensor read_idx(const std::string& path) {
  FileSource source(path);
  return read_idx(source, path);
}

Tensor read_idx(std::span<const std::uint8_t> bytes, std::string_view path) {
  MemorySource source(bytes);
  return read_idx(source, path);
}

}  // namespace tandem::data
