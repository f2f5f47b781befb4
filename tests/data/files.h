// What the data tests share: folders that vanish, IDX bytes, gzip, and test cases run in a process of their own.
#pragma once
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <thread>
#include <vector>

#include <tandem/tests/support/test.h>

#if defined(TANDEM_ZLIB)
#include <zlib.h>
#endif

extern char** environ;

namespace tandem::test {

using Bytes = std::vector<std::uint8_t>;

/// A new folder below the system's temporary one, removed with everything in it at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "tandem-data-XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }
  /// Writes a file and returns its path.
  std::string write(const std::string& name, const Bytes& bytes) const {
    const std::string path = path_ + "/" + name;
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    return path;
  }

 private:
  std::string path_;
};

/// The IDX header of unsigned bytes of these sizes.
inline Bytes idx_header(std::initializer_list<std::uint32_t> sizes, std::uint8_t type = 8) {
  Bytes bytes{0, 0, type, static_cast<std::uint8_t>(sizes.size())};
  for (const std::uint32_t size : sizes)
    for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<std::uint8_t>(size >> shift));
  return bytes;
}

/// An IDX file of these sizes whose element i is i modulo `period`.
inline Bytes idx_file(std::initializer_list<std::uint32_t> sizes, std::size_t period = 251) {
  Bytes bytes = idx_header(sizes);
  std::size_t count = 1;
  for (const std::uint32_t size : sizes) count *= size;
  for (std::size_t i = 0; i < count; ++i) bytes.push_back(static_cast<std::uint8_t>(i % period));
  return bytes;
}

#if defined(TANDEM_ZLIB)
inline Bytes gzip(const Bytes& bytes) {
  Bytes out(bytes.size() + bytes.size() / 100 + 1000);
  z_stream stream{};
  REQUIRE(deflateInit2(&stream, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  Bytes in = bytes;
  stream.next_in = in.data();
  stream.avail_in = static_cast<uInt>(in.size());
  stream.next_out = out.data();
  stream.avail_out = static_cast<uInt>(out.size());
  REQUIRE(deflate(&stream, Z_FINISH) == Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}
#endif

/// Runs one test case of this program, marked with doctest::skip(), in a process of its own (no comma in its name).
/// Returns its exit status; 128 + the signal that ended it; -1 when it was killed after `seconds`.
inline int run_alone(const char* test_case, int seconds) {
  const std::string filter = std::string("--test-case=") + test_case;
  std::string program = "/proc/self/exe", no_skip = "--no-skip", one = filter;
  char* arguments[] = {program.data(), no_skip.data(), one.data(), nullptr};
  pid_t child = 0;
  REQUIRE(posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environ) == 0);
  int status = 0;
  for (int i = 0; i < seconds * 100; ++i) {
    if (waitpid(child, &status, WNOHANG) == child)
      return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return -1;
}

}  // namespace tandem::test
