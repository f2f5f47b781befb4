#include <tandem/parallel/comm/shm_segment.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <limits>
#include <string>

#include <fmt/format.h>

namespace tandem::parallel {
namespace {

// What the machine can still give. Asking for more would not fail: the kernel would look for a process to kill.
std::size_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  std::size_t kilobytes = 0;
  while (file >> key >> kilobytes) {
    if (key == "MemAvailable:") return kilobytes << 10;
    std::getline(file, unit);
  }
  return std::numeric_limits<std::size_t>::max();
}

// Growing a file beyond `ulimit -f` kills the process unless it ignores that signal, and these are files to the kernel.
bool exceeds_file_limit(std::size_t bytes) {
  rlimit limit{};
  return getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur;
}

}  // namespace

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}
FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) close(fd_);
}

Mapping::Mapping(Mapping&& other) noexcept { *this = std::move(other); }
Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}
Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

int make_memory_file(std::size_t bytes, FileDescriptor& file) {
  if (bytes > available_bytes()) return ENOMEM;
  if (exceeds_file_limit(bytes)) return EFBIG;
  file = FileDescriptor(memfd_create("tandem", MFD_CLOEXEC));
  if (file.get() < 0) return errno;
  return ftruncate(file.get(), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
}

int open_file_of(pid_t process, int fd, FileDescriptor& file) {
  file = FileDescriptor(open(fmt::format("/proc/{}/fd/{}", process, fd).c_str(), O_RDWR | O_CLOEXEC));
  return file.get() >= 0 ? 0 : errno;
}

int reserve(const FileDescriptor& file, std::size_t first, std::size_t bytes) {
  if (bytes > available_bytes()) return ENOMEM;
  if (exceeds_file_limit(first + bytes)) return EFBIG;
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(file.get(), static_cast<off_t>(first), static_cast<off_t>(bytes));
  return error;
}

int map_file(const FileDescriptor& file, std::size_t bytes, Mapping& mapping) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (data == MAP_FAILED) return errno;
  mapping = Mapping();
  mapping.data_ = static_cast<char*>(data);
  mapping.bytes_ = bytes;
  return 0;
}

std::size_t whole_pages(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

}  // namespace tandem::parallel
