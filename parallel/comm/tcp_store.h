// TCPStore: the store as a client of a StoreServer sees it.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include <tandem/parallel/comm/store.h>

namespace tandem::parallel {

/// Which server, and who asks.
struct TCPStoreOptions {
  std::string host = "127.0.0.1";
  int port = 0;
  int rank = -1;  // of this process, or a launcher's node; with -1 nobody notices when it ends
  int world_size = -1;
  double timeout_seconds = 30;  // for the server to come, for each key, and for other answers
  std::string secret = {};      // of the job; the server must know the same
  int restart = 0;              // which start of the job this process belongs to; -1: all (for launchers)
  int holder = -1;              // the rank whose process holds the server; -1: a launcher, or nobody knows
};

/// A client of a StoreServer. May be used by several threads at once. When a rank is lost, a get that has to wait
/// throws CommError with its number and how it ended; so does every call, about the holder, when the server is lost.
class TCPStore final : public Store {
 public:
  /// Tries to connect until the timeout.
  explicit TCPStore(const TCPStoreOptions& options);
  /// Says goodbye: this rank is not lost.
  ~TCPStore() override;
  TCPStore(const TCPStore&) = delete;
  TCPStore& operator=(const TCPStore&) = delete;
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
