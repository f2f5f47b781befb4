#include <tandem/parallel/comm/meeting_file.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <sstream>
#include <thread>

#include <fmt/format.h>

#include <tandem/parallel/comm/process_group.h>
#include <tandem/parallel/comm/process_identity.h>
#include <tandem/parallel/comm/rendezvous.h>
#include <tandem/parallel/comm/secret.h>
#include <tandem/parallel/comm/start_environment.h>
#include <tandem/parallel/comm/store_limits.h>

namespace tandem::parallel {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kRemedy = "or set MASTER_ADDR and MASTER_PORT, and the ranks meet there";
constexpr std::size_t kMaxBytes = 4096;
constexpr std::size_t kNameDigits = 24;

bool is_private(const struct stat& about) {
  return about.st_uid == geteuid() && (about.st_mode & (S_IRWXG | S_IRWXO)) == 0;
}

// Every rank finds the same, since it depends on the user and the environment alone.
std::string meeting_folder() {
  struct stat about {};
  const std::optional<std::string> given = text_from_environment("XDG_RUNTIME_DIR");
  if (given && stat(given->c_str(), &about) == 0 && S_ISDIR(about.st_mode) && is_private(about)) return *given;
  std::string folder =
      fmt::format("{}/tandem-{}", text_from_environment("TMPDIR").value_or("/tmp"), static_cast<unsigned>(geteuid()));
  const bool made = mkdir(folder.c_str(), S_IRWXU) == 0 || errno == EEXIST;
  check(made, kInit,
        "the folder '{}', for the file where the ranks meet, cannot be made: {}; set TMPDIR to another, {}", folder,
        std::strerror(errno), kRemedy);
  // Somebody else may have made it before, or a link that leads elsewhere.
  const bool known = lstat(folder.c_str(), &about) == 0;
  check(known && S_ISDIR(about.st_mode) && is_private(about), kInit,
        "'{}', for the file where the ranks meet, is not a folder that this user alone may enter; remove it, set "
        "TMPDIR to another place, {}",
        folder, kRemedy);
  return folder;
}

std::string digest(std::string_view text) { return to_hex(proof("meeting", text)).substr(0, kNameDigits); }

// Of the files of this host: folders may be shared between hosts.
std::string name_prefix() { return fmt::format("tandem-meeting-{}-", digest(host_id())); }

std::string meeting_path(const std::string& job_id) {
  return fmt::format("{}/{}{}", meeting_folder(), name_prefix(), digest(job_id));
}

struct Contents {
  Meeting meeting;
  std::string writer;  // identity of rank 0's process
};

// Null when there is no file.
std::optional<Contents> read_file(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0 && errno == ENOENT) return std::nullopt;
  struct stat about {};
  const bool good = fd >= 0 && fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && is_private(about);
  std::string text(kMaxBytes, '\0');
  const ssize_t n = good ? read(fd, text.data(), text.size()) : -1;
  if (fd >= 0) close(fd);
  check(n >= 0, kInit, "'{}', where the ranks meet, is not a file that this user alone may read; remove it, {}", path,
        kRemedy);
  std::istringstream lines(text.substr(0, static_cast<std::size_t>(n)));
  Contents c;
  std::string digits;
  lines >> c.meeting.port >> digits;
  std::getline(lines >> std::ws, c.writer);
  const std::optional<std::string> secret = from_hex(digits);
  check(lines && secret && secret->size() == kSecretBytes && c.meeting.port >= 1 && c.meeting.port <= 65535, kInit,
        "'{}', where the ranks meet, has not been written by rank 0; remove it, {}", path, kRemedy);
  c.meeting.secret = *secret;
  return c;
}

// Removes what jobs that were killed have left.
void remove_stale_files(const std::filesystem::path& folder) {
  const std::string prefix = name_prefix();
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
    if (!entry.path().filename().string().starts_with(prefix)) continue;
    try {
      const std::optional<Contents> c = read_file(entry.path());
      if (c && !is_running(c->writer)) unlink(entry.path().c_str());
    } catch (const Error&) {  // it is not one of ours, or not yet written
    }
  }
}

}  // namespace

MeetingFile::MeetingFile(const std::string& job_id, const Meeting& meeting) {
  const std::string path = meeting_path(job_id), self = identity_of(getpid());
  const std::optional<Contents> before = read_file(path);
  check(!before || before->writer == self || !is_running(before->writer), kInit,
        "another program of this job is starting on this host, too, and both would meet at '{}'; start one after the "
        "other, {}",
        path, kRemedy);
  remove_stale_files(std::filesystem::path(path).parent_path());
  const std::string temporary = fmt::format("{}.{}", path, getpid());
  unlink(temporary.c_str());
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, S_IRUSR | S_IWUSR);
  const std::string text = fmt::format("{} {}\n{}\n", meeting.port, to_hex(meeting.secret), self);
  const bool written = fd >= 0 && write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
                       rename(temporary.c_str(), path.c_str()) == 0;
  const int reason = errno;
  if (fd >= 0) close(fd);
  if (!written) unlink(temporary.c_str());
  check(written, kInit, "the file '{}', where the ranks meet, cannot be written: {}; make room, {}", path,
        std::strerror(reason), kRemedy);
  path_ = path;
}

MeetingFile::~MeetingFile() { unlink(path_.c_str()); }

Meeting read_meeting(const std::string& job_id, int rank, int world_size, double seconds) {
  const std::string path = meeting_path(job_id);
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (; Clock::now() < end; std::this_thread::sleep_for(std::chrono::milliseconds(5)))
    if (const std::optional<Contents> c = read_file(path); c && is_running(c->writer)) return c->meeting;
  throw CommError(0,
                  fmt::format("{}waited {} s for rank 0 to write '{}'; see that it has started, as the same user and "
                              "on this host, {}",
                              who(rank, world_size), seconds, path, kRemedy));
}

}  // namespace tandem::parallel
