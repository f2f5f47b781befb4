// StoreServer: holds the keys of a job and answers its TCPStores.
#pragma once
#include <memory>
#include <string>

namespace tandem::parallel {

/// Where a StoreServer listens.
struct StoreServerOptions {
  std::string host = "127.0.0.1";
  int port = 0;             // 0: one given by the system
  bool launched = false;    // a launcher will report how each rank ended
  std::string secret = {};  // of the job: only who proves to know it is answered; without one, loopback alone
};

/// Serves the store from one thread of its own. Each connection begins with a handshake in which both sides prove that
/// they know the secret; who does not within 5 s is not answered, and costs no more than a small buffer. A rank is lost
/// when its connection ends without a goodbye: then the key "ended/<rank>" is set to how it ended, and every get that
/// waits, or would wait, is answered with that. So it is when a client sets that key itself. A rank is refused while
/// another process is there as that rank.
class StoreServer {
 public:
  /// Binds and listens; Error names the port when it is in use, and says how to give a secret where one is needed.
  /// Clients can connect, and are answered after `start`.
  explicit StoreServer(const StoreServerOptions& options = {});
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  /// Starts the thread.
  void start();
  int port() const;
  /// For launchers: the job starts again, for the `restart`-th time. What is known of ranks is forgotten, and all keys
  /// but those that begin with "launcher/". A get of an earlier start that waits, and whatever a client of an earlier
  /// start asks from now on, is answered with an error, and its connection ends; clients whose restart is -1 belong to
  /// all starts.
  void begin_restart(int restart);
  /// For launchers: the process of a rank has ended, as `text` says, such as "ended with exit code 3".
  void report_end(int rank, const std::string& text);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem::parallel
