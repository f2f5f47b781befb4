// A file that is replaced as a whole: written under a temporary name in the same directory, synced and renamed, so that
// a kill or a power cut at any moment leaves the old contents or the new ones.
#pragma once
#include <cstddef>
#include <string>

namespace tandem {

/// A file that is replaced as a whole, or not at all.
class AtomicFile {
 public:
  /// Starts a new version of the file `path`, as "path.tmp-<process>-<number>". Throws Error naming path and reason;
  /// errors begin with `op`.
  explicit AtomicFile(const std::string& path, const char* op = "save");
  /// Removes the temporary file unless commit() has put it in place.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  /// Appends bytes. Throws Error, with the old file unchanged, when they cannot be written (a full disk).
  void write(const void* data, std::size_t bytes);
  /// Syncs the contents, renames the file to its name, and syncs the directory. Throws Error.
  void commit();

 private:
  std::string path_, temporary_;
  const char* op_;
  int fd_ = -1;
};

}  // namespace tandem
