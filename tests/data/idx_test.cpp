// The IDX reader: what it reads, and the error of every way a file can be wrong.
#include <tandem/data/idx.h>

#include <sys/resource.h>

#include <tandem/tests/data/files.h>

namespace tandem {
namespace {

using namespace test;
using data::read_idx;

Bytes joined(Bytes a, const Bytes& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST_CASE("idx: a raw file gives its bytes in its shape") {
  const TemporaryFolder folder;
  const Bytes bytes = idx_file({3, 2, 5});
  for (const Tensor& t : {read_idx(folder.write("raw", bytes)), read_idx(bytes, "memory")}) {
    CHECK(t.shape() == Shape{3, 2, 5});
    CHECK(t.dtype() == uint8);
    CHECK(t.to_vector<std::uint8_t>() == Bytes(bytes.begin() + 16, bytes.end()));
  }
}

TEST_CASE("idx: files larger than one chunk are whole") {
  const TemporaryFolder folder;
  const Bytes bytes = idx_file({3000, 28, 28}), body(bytes.begin() + 16, bytes.end());
  CHECK(read_idx(folder.write("raw", bytes)).to_vector<std::uint8_t>() == body);
  CHECK(read_idx(bytes, "memory").to_vector<std::uint8_t>() == body);
#if defined(TANDEM_ZLIB)
  CHECK(read_idx(folder.write("packed", gzip(bytes))).to_vector<std::uint8_t>() == body);
#endif
}

TEST_CASE("idx: no rows are an empty tensor") {
  CHECK(read_idx(idx_file({0, 28, 28}), "none").shape() == Shape{0, 28, 28});
  CHECK(read_idx(idx_file({0}), "none").numel() == 0);
}

TEST_CASE("idx: eight dimensions are read, and the ninth is an error") {
  CHECK(read_idx(idx_file({1, 2, 1, 2, 1, 2, 1, 2}), "eight").shape() == Shape{1, 2, 1, 2, 1, 2, 1, 2});
  CHECK_ERROR(read_idx(idx_file({1, 1, 1, 1, 1, 1, 1, 1, 1}), "nine"), "nine has 9 dimensions (byte 3)", "1 to 8");
  CHECK_ERROR(read_idx(Bytes{0, 0, 8, 0}, "single"), "single has 0 dimensions (byte 3)");
}

TEST_CASE("idx: what is no IDX file of bytes is named as such") {
  CHECK_ERROR(read_idx(Bytes{0x89, 'P', 'N', 'G', 0, 0}, "cat.png"), "[read_idx] cat.png is no IDX file", "at byte 0",
              "found 89 50", "give a file");
  CHECK_ERROR(read_idx(idx_header({2}, 0x0d), "floats"), "floats holds elements of type 0x0d (byte 2)", "0x08");
}

TEST_CASE("idx: files cut anywhere say where they end and what was expected") {
  CHECK_ERROR(read_idx(Bytes{}, "none"), "none ends at byte 0", "expected 4 bytes, found 0", "get the file again");
  CHECK_ERROR(read_idx(Bytes{0, 0, 8}, "magic"), "magic ends at byte 3", "expected 4 bytes, found 3");
  const Bytes whole = idx_file({4, 3});
  CHECK_ERROR(read_idx(std::span(whole).first(11), "header"), "header ends at byte 11 within its header",
              "expected 12 bytes, found 11");
  CHECK_ERROR(read_idx(std::span(whole).first(20), "body"), "body ends at byte 20", "{4, 3}", "24 bytes, found 20");
  for (std::size_t length = 0; length < whole.size(); ++length)
    CHECK_ERROR(read_idx(std::span(whole).first(length), "cut"), "cut ends at byte");
}

TEST_CASE("idx: bytes behind the end are an error") {
  CHECK_ERROR(read_idx(joined(idx_file({4, 3}), {1, 2}), "long"), "long goes on at byte 24", "24 bytes", "at least 26");
}

TEST_CASE("idx: shapes that no memory could hold are an error") {
  const std::uint32_t most = 0xffffffff;
  CHECK_ERROR(read_idx(idx_header({most, most, most}), "huge"), "huge claims the impossible shape", "bytes 4 to 15");
  CHECK_ERROR(read_idx(idx_header({0, most, most, most}), "hidden"), "hidden claims the impossible shape");
}

TEST_CASE("idx: files that cannot be opened or read say so") {
  const TemporaryFolder folder;
  CHECK_ERROR(read_idx(folder.path() + "/none"), "/none cannot be opened: No such file", "check the path");
  CHECK_ERROR(read_idx(folder.path()), folder.path().c_str(), "cannot be read at byte 0: Is a directory");
}

#if defined(TANDEM_ZLIB)
TEST_CASE("idx: gzip is recognised by its bytes, not by its name") {
  const TemporaryFolder folder;
  const Bytes raw = idx_file({4, 3}), packed = gzip(raw), body(raw.begin() + 12, raw.end());
  CHECK(read_idx(folder.write("looks-raw", packed)).to_vector<std::uint8_t>() == body);
  CHECK(read_idx(folder.write("looks-packed.gz", raw)).to_vector<std::uint8_t>() == body);
  CHECK(read_idx(packed, "memory").to_vector<std::uint8_t>() == body);
}

TEST_CASE("idx: a gzip file of several members is their contents in a row") {
  const Bytes raw = idx_file({4, 3});
  const Bytes packed = joined(gzip(Bytes(raw.begin(), raw.begin() + 14)), gzip(Bytes(raw.begin() + 14, raw.end())));
  CHECK(read_idx(packed, "two").to_vector<std::uint8_t>() == Bytes(raw.begin() + 12, raw.end()));
}

TEST_CASE("idx: gzip files cut anywhere or damaged are errors with the byte") {
  const Bytes packed = gzip(idx_file({40, 3}));
  for (std::size_t length = 2; length < packed.size(); ++length) {
    const std::string where = fmt::format("cut: the gzip data breaks off at byte {}", length);
    CHECK_ERROR(read_idx(std::span(packed).first(length), "cut"), where.c_str(), "get the file again");
  }
  Bytes damaged = packed;
  damaged[packed.size() - 8] ^= 1;  // the checksum
  CHECK_ERROR(read_idx(damaged, "bad"), "bad: the gzip data is damaged at byte", "incorrect data check");
  CHECK_ERROR(read_idx(joined(packed, {7, 7}), "tail"), "tail: the gzip data is damaged at byte", "header");
}

TEST_CASE("idx: contents of a gzip file that are short or long are errors with the bytes") {
  Bytes raw = idx_file({4, 3});
  raw.push_back(9);
  CHECK_ERROR(read_idx(gzip(raw), "long"), "long goes on at byte 24", "at least 25");
  raw.resize(20);
  CHECK_ERROR(read_idx(gzip(raw), "short"), "short ends at byte 20", "24 bytes, found 20");
}
#else
TEST_CASE("idx: without zlib a gzip file is an error that says so") {
  CHECK_ERROR(read_idx(Bytes{0x1f, 0x8b, 8, 0}, "packed.gz"), "packed.gz is compressed by gzip", "no zlib", "gunzip");
}
#endif

// tracel-ai/burn#5651, CEA-LIST/N2D2#118, deeplearning4j/deeplearning4j#4588 and #3670, ooples/AiDotNet PR#826: a
// header whose count lies aborted in an allocation of terabytes; a gzip file was read as raw; a cut one gave zeros.
constexpr const char* kLyingHeader =
    "report: an IDX header that lies about its count is an error and allocates nothing";
TEST_CASE(kLyingHeader* doctest::skip()) {
  [[maybe_unused]] const rlimit limit{std::size_t{512} << 20, std::size_t{512} << 20};
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
#endif
  const Bytes ten(10, 1), lying = joined(idx_header({0xffffffff}), ten);
  CHECK_ERROR(read_idx(lying, "lying"), "lying ends at byte 18", "4294967303 bytes, found 18");
  const Bytes images = joined(idx_header({0xffffffff, 28, 28}), ten);
  CHECK_ERROR(read_idx(images, "lying"), "lying ends at byte 26", "3367254359296 bytes, found 26");
  const TemporaryFolder folder;
  CHECK_ERROR(read_idx(folder.write("train-images", images)), "/train-images ends at byte 26", "found 26");
#if defined(TANDEM_ZLIB)
  CHECK_ERROR(read_idx(gzip(images), "packed"), "packed ends at byte 26", "found 26");
  const Bytes packed = gzip(idx_file({100, 28, 28}));
  CHECK_ERROR(read_idx(std::span(packed).first(packed.size() - 1), "cut"), "cut: the gzip data breaks off at byte");
#endif
  CHECK(read_idx(idx_file({4}), "sound").numel() == 4);
}
TEST_CASE("idx: the lying headers are met in a process with little memory") { CHECK(run_alone(kLyingHeader, 20) == 0); }

}  // namespace
}  // namespace tandem
