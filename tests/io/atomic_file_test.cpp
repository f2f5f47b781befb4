// Replacing a file: whatever goes wrong, even a kill, the old contents stay or the new ones are there.
#include <tandem/tensor/io/atomic_file.h>

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdlib>

#include <tandem/tensor/io/safetensors.h>

#include "support.h"

using namespace tandem;
using namespace tandem::test;

TEST_CASE("a file appears under its name only when it is complete") {
  const Directory directory;
  const std::string path = directory / "f";
  write_bytes(path, "old");
  chmod(path.c_str(), 0640);
  {
    AtomicFile file(path);
    file.write("new", 3);
    CHECK(read_bytes(path) == "old");
    file.write(" contents", 9);
    file.commit();
  }
  CHECK(read_bytes(path) == "new contents");
  CHECK(directory.names() == std::vector<std::string>{"f"});
  struct stat info {};
  REQUIRE(stat(path.c_str(), &info) == 0);
  CHECK((info.st_mode & 07777) == 0640);
  { AtomicFile(path).write("dropped", 7); }
  CHECK(read_bytes(path) == "new contents");
  CHECK(directory.names() == std::vector<std::string>{"f"});
}

TEST_CASE("two writers of one file do not mix") {
  const Directory directory;
  const std::string path = directory / "f";
  AtomicFile a(path), b(path);
  a.write("a", 1);
  b.write("b", 1);
  a.commit();
  CHECK(read_bytes(path) == "a");
  b.commit();
  CHECK(read_bytes(path) == "b");
}

TEST_CASE("a place that cannot be written to is an error with path, reason and remedy") {
  const Directory directory;
  CHECK_ERROR(AtomicFile(directory / "missing/f"), "missing/f cannot be written: No such file or directory",
              "create the directory first");
  CHECK_ERROR(AtomicFile(directory / ""), "is not a regular file; choose another name");
  CHECK_ERROR(AtomicFile("/proc/f"), "/proc/f cannot be written", "choose a place that can be written to");
  CHECK_ERROR(AtomicFile(""), "[save]", "the file's name is empty; give one");
  CHECK_ERROR(AtomicFile("/dev/null", "timeline"), "[timeline]");
  CHECK_ERROR(AtomicFile("/dev/null"), "/dev/null exists and is not a regular file");
  write_bytes(directory / "file", "");
  CHECK_ERROR(AtomicFile(directory / "file/f"), "Not a directory", "choose a place that can be written to");
  // The name is taken by a directory meanwhile.
  AtomicFile file(directory / "late");
  std::filesystem::create_directory(directory / "late");
  CHECK_ERROR(file.commit(), "late cannot be written: Is a directory (renaming)");
}

TEST_CASE("a disk without room leaves the old file") {
  const Directory directory;
  const std::string path = directory / "f";
  write_safetensors(path, {{"a", ones({3})}});
  const std::string old = read_bytes(path);
  // A limit on the size of files stands for the full disk: the write is cut short and then fails.
  struct sigaction ignore {
  }, previous{};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGXFSZ, &ignore, &previous);
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  const rlimit small{1 << 20, limit.rlim_max};
  const Tensor large = ones({1 << 19});
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string error = error_of([&] { write_safetensors(path, {{"a", large}}); });
  setrlimit(RLIMIT_FSIZE, &limit);
  sigaction(SIGXFSZ, &previous, nullptr);
  CHECK(contains(error, path + " cannot be written: File too large (writing)"));
  CHECK(contains(error, "left as it was; free some space"));
  CHECK(read_bytes(path) == old);
  CHECK(directory.names() == std::vector<std::string>{"f"});
}

// Run by the next test in a process of its own, to be killed.
TEST_CASE("child: save until killed" * doctest::skip()) {
  const char* path = std::getenv("TANDEM_TEST_FILE");
  REQUIRE(path != nullptr);
  for (float value = 1;; value += 1) write_safetensors(path, {{"a", full({1 << 20}, value)}});
}

TEST_CASE("a kill while saving leaves a complete file") {
  const Directory directory;
  const std::string path = directory / "f";
  write_safetensors(path, {{"a", zeros({1 << 20})}});
  setenv("TANDEM_TEST_FILE", path.c_str(), 1);
  for (int round = 0; round < 8; ++round) {
    std::string program = "io_test", filter = "-tc=child: save until killed", no_skip = "-ns";
    char* const arguments[] = {program.data(), filter.data(), no_skip.data(), nullptr};
    posix_spawn_file_actions_t quiet;
    posix_spawn_file_actions_init(&quiet);
    posix_spawn_file_actions_addopen(&quiet, 1, "/dev/null", O_WRONLY, 0);
    pid_t child = 0;
    REQUIRE(posix_spawn(&child, "/proc/self/exe", &quiet, nullptr, arguments, environ) == 0);
    posix_spawn_file_actions_destroy(&quiet);
    // Wait until a save is under way. In later rounds more than one must have come before.
    bool saving = false, alive = true;
    for (int seen = 0; alive && seen <= round;) {
      alive = waitpid(child, nullptr, WNOHANG) == 0;
      const bool now = directory.names().size() > 1;
      seen += now && !saving ? 1 : 0;
      saving = now;
    }
    REQUIRE(alive);
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    REQUIRE(WIFSIGNALED(status));
    const std::vector<float> values = read_safetensors(path).tensors.at(0).second.to_vector<float>();
    CHECK(values.size() == std::size_t{1} << 20);
    CHECK(values == std::vector<float>(values.size(), values[0]));
    for (const std::string& name : directory.names())
      if (name != "f") std::filesystem::remove(directory / name);
  }
  unsetenv("TANDEM_TEST_FILE");
}
