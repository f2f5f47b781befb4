// Pieces of memory that several processes map: anonymous files, which vanish with the last process that uses them.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <utility>

namespace tandem::parallel {

/// An open file, closed at the end.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept { *this = std::move(other); }
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

/// A mapped file, unmapped at the end.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();
  char* data() const { return data_; }

 private:
  friend int map_file(const FileDescriptor& file, std::size_t bytes, Mapping& mapping);
  char* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// These return 0, or the error as errno has it: the ranks must hear of it before one of them may throw.

/// Makes an anonymous file of this size, of which nothing is reserved.
int make_memory_file(std::size_t bytes, FileDescriptor& file);
/// Opens what another process has open as `fd`.
int open_file_of(pid_t process, int fd, FileDescriptor& file);
/// Takes the memory for a range: touching a page that cannot be had later would kill the process.
int reserve(const FileDescriptor& file, std::size_t first, std::size_t bytes);
int map_file(const FileDescriptor& file, std::size_t bytes, Mapping& mapping);

/// `bytes` rounded up to whole pages.
std::size_t whole_pages(std::size_t bytes);

}  // namespace tandem::parallel
