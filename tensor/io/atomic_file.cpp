#include <tandem/tensor/io/atomic_file.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <tandem/tensor/error.h>
#include <tandem/tensor/fault.h>

namespace tandem {
namespace {

std::string directory_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

const char* remedy(const std::string& path, int error) {
  struct stat directory {};
  switch (error) {
    case ENOENT:  // also where a directory takes no new files, such as /proc
      if (stat(directory_of(path).c_str(), &directory) != 0) return "create the directory first";
      break;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return "free some space or choose another place";
    default:
      break;
  }
  return "choose a place that can be written to";
}

[[noreturn]] void fail_write(const char* op, const std::string& path, const char* step, int error) {
  fail(op, "{} cannot be written: {} ({}); a file of that name is left as it was; {}", path,
       std::generic_category().message(error), step, remedy(path, error));
}

void sync_directory(const char* op, const std::string& path) {
  const int fd = open(directory_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool ok = fd >= 0 && fsync(fd) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  // Some file systems cannot sync a directory, and a directory may be writable but not readable.
  check(ok || error == EINVAL || error == ENOTSUP || error == EACCES, op,
        "{} is written, but its directory cannot be synced: {}; it may be lost in a power cut, so save it again", path,
        std::generic_category().message(error));
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path, const char* op) : path_(path), op_(op) {
  check(!path.empty(), op, "the file's name is empty; give one");
  struct stat old {};
  const bool exists = stat(path.c_str(), &old) == 0;
  // Renaming would replace a device such as /dev/null by a file.
  check(!exists || S_ISREG(old.st_mode), op, "{} exists and is not a regular file; choose another name", path);
  for (int number = 0; fd_ < 0; ++number) {
    temporary_ = fmt::format("{}.tmp-{}-{}", path, getpid(), number);
    fd_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ < 0 && errno != EEXIST && errno != EINTR)
      fail_write(op, path, "creating a temporary file beside it", errno);
  }
  if (exists) (void)!fchmod(fd_, old.st_mode & 07777);  // a replaced file keeps its permissions where that is allowed
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  close(fd_);
  unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(fd_, next, std::min<std::size_t>(bytes, std::size_t{1} << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_write(op_, path_, "writing", errno);
    next += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void AtomicFile::commit() {
  fault::point(fault::Point::save);
  if (fsync(fd_) != 0) fail_write(op_, path_, "syncing", errno);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) fail_write(op_, path_, "renaming", errno);
  close(fd_);
  fd_ = -1;
  sync_directory(op_, path_);
}

}  // namespace tandem
