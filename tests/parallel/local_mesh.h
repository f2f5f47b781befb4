// LocalMesh: a Mesh between threads of this process, which counts what its members send.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <tandem/parallel/comm/mesh.h>

namespace tandem::test {

/// What the members of one group share. Lives as long as the program.
struct LocalHub {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::tuple<int, int, int>, std::deque<std::vector<char>>> under_way;  // by lane, sender and receiver
  std::set<int> closed;                                                          // members
  std::map<std::pair<int, int>, std::size_t> bytes;                              // by sender and receiver, of data

  static LocalHub& of(const std::string& group) {
    static std::mutex mutex;
    static std::map<std::string, LocalHub> hubs;
    const std::lock_guard lock(mutex);
    return hubs[group];
  }
};

class LocalMesh final : public parallel::Mesh {
 public:
  LocalMesh(const parallel::GroupSetup& setup, int rank) : hub_(LocalHub::of(setup.name)), rank_(rank) {}
  ~LocalMesh() override { close(); }
  void exchange(int lane, const std::vector<parallel::Transfer>& sends, const std::vector<parallel::Transfer>& receives,
                double seconds) override {
    const auto deadline = std::chrono::steady_clock::now() +
                          std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
    std::unique_lock lock(hub_.mutex);
    for (const parallel::Transfer& t : sends) {
      if (t.bytes == 0) continue;
      if (gone(t.peer)) throw parallel::ExchangeError{.peers = {t.peer}, .text = "closed"};
      const char* data = static_cast<const char*>(t.data);
      hub_.under_way[{lane, rank_, t.peer}].emplace_back(data, data + t.bytes);
      if (t.bytes > 4096) hub_.bytes[{rank_, t.peer}] += t.bytes;
    }
    hub_.changed.notify_all();
    for (const parallel::Transfer& t : receives) {
      if (t.bytes == 0) continue;
      auto& arrived = hub_.under_way[{lane, t.peer, rank_}];
      if (!hub_.changed.wait_until(lock, deadline, [&] { return !arrived.empty() || gone(t.peer); }))
        throw parallel::ExchangeError{.peers = {t.peer}, .late = true, .text = "late"};
      if (arrived.empty()) throw parallel::ExchangeError{.peers = {t.peer}, .text = "closed"};
      if (arrived.front().size() != t.bytes) throw Error("transfers of different sizes meet");
      std::memcpy(t.data, arrived.front().data(), t.bytes);
      arrived.pop_front();
    }
  }
  void abandon() override {
    const std::lock_guard lock(hub_.mutex);
    abandoned_ = true;
    hub_.changed.notify_all();
  }
  void close() override {
    const std::lock_guard lock(hub_.mutex);
    hub_.closed.insert(rank_);
    hub_.changed.notify_all();
  }

 private:
  bool gone(int peer) const { return abandoned_ || hub_.closed.contains(peer) || hub_.closed.contains(rank_); }
  LocalHub& hub_;
  const int rank_;
  bool abandoned_ = false;
};

}  // namespace tandem::test
