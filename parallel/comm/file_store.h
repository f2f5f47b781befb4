// FileStore: the store in a file that all ranks reach, such as one on a network file system.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include <tandem/parallel/comm/store.h>

namespace tandem::parallel {

/// Which file, and who asks.
struct FileStoreOptions {
  std::string path = {};
  int rank = -1;  // of this process; with -1 nobody notices when it ends
  int world_size = -1;
  double timeout_seconds = 30;  // for each key
};

/// Records are appended to the file under a lock, and read back by everybody. A rank holds a lock of its own while it
/// is there, by which the others see that it has ended. The last rank that leaves removes the file; one that an earlier
/// run has left behind is an Error in the constructor. May be used by several threads at once.
class FileStore final : public Store {
 public:
  /// Makes the file, or joins those who have it open. Error when it cannot be made, is no store, or is left from an
  /// earlier run.
  explicit FileStore(const FileStoreOptions& options);
  ~FileStore() override;
  FileStore(const FileStore&) = delete;
  FileStore& operator=(const FileStore&) = delete;
  void set(std::string_view key, std::string_view value) override;
  std::string get(std::string_view key, std::optional<double> timeout_seconds = {}) override;
  bool check(std::string_view key) override;
  std::int64_t add(std::string_view key, std::int64_t amount) override;
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired) override;
  bool remove(std::string_view key) override;
  std::int64_t num_keys(std::string_view prefix = {}) override;
  double timeout_seconds() const override;
  Names names() const override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem::parallel
