// What a StoreServer knows: the keys of a job, who waits for them, and which ranks are there. Without sockets, threads
// or clocks; who uses it brings the clients and the moment.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>

#include <tandem/parallel/comm/store_handshake.h>
#include <tandem/parallel/comm/store_protocol.h>

namespace tandem::parallel {

class StoreHub {
 public:
  /// A connection that has proved the secret.
  class Client {
   public:
    virtual ~Client() = default;
    /// Sends a reply; with `last` the connection ends then.
    virtual void answer(const store_protocol::Reply& reply, bool last) = 0;
    store_protocol::Identity who = {};
    bool present = false;        // stands for the presence of its rank
    std::string waits_for = {};  // the key of a get that is not answered yet
  };

  /// With `launched` a launcher will say how each rank has ended.
  explicit StoreHub(bool launched) : launched_(launched) {}
  /// Answers that the client may stay, or why not.
  void join(Client& client);
  /// Answers a request, or notes that it waits.
  void request(Client& client, const store_protocol::Request& request);
  /// The connection has ended, or ends. Returns the rank that is lost by it if a launcher will say why in a moment;
  /// when that has passed, call `not_explained`.
  std::optional<int> ended(Client& client);
  void not_explained(int rank, int restart);
  void report_end(int rank, const std::string& text);
  void begin_restart(int restart);
  int restart() const { return restart_; }
  /// Whether a rank was lost, or has left, or a group has found that one does not come, and others than the store's
  /// holder are there, who may wait for it.
  bool others_may_ask() const;

 private:
  struct Rank {
    int connections = 0;  // a process may join again while something still holds its former store
    std::string token = {};
    bool left = false;
    std::optional<std::string> lost = {};  // how
  };
  using Reply = store_protocol::Reply;

  std::optional<Reply> reply_to(Client& client, const store_protocol::Request& request);
  std::optional<std::string> refusal(const Client& client) const;
  bool is_stale(const Client& client) const;
  Reply stale(const Client& client) const;
  std::optional<Reply> lost_reply() const;
  void put(const std::string& key, const std::string& value);
  bool erase(const std::string& key);
  void leave(Client& client);
  void launcher_ended(Client& client);
  static bool is_launcher(const Client& client) { return client.who.restart == -1; }

  const bool launched_;
  int restart_ = 0;
  std::unordered_map<std::string, std::string> values_;
  std::size_t bytes_ = 0;
  std::set<Client*> clients_;
  std::map<int, Rank> ranks_;
  std::map<int, int> launchers_;  // connections of each node's
};

}  // namespace tandem::parallel
