#include <tandem/parallel/comm/gloo_connections.h>

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <gloo/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>

#include <tandem/parallel/comm/mesh_keys.h>
#include <tandem/parallel/comm/mesh_reason.h>
#include <tandem/parallel/comm/start_environment.h>

namespace tandem::parallel {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

constexpr auto kLook = Milliseconds(100);

Milliseconds in_milliseconds(double seconds) {
  return Milliseconds(std::max<std::int64_t>(1, std::int64_t(seconds * 1e3)));
}

// Our store as Gloo sees it, for the time in which the group is made. Keys begin with the rank of who sets them.
class StoreAdapter final : public gloo::rendezvous::Store {
 public:
  StoreAdapter(const GroupSetup& setup, int rank) : setup_(setup), rank_(rank) {}
  void set(const std::string& key, const std::vector<char>& data) override {
    setup_.store->set(full(key), {data.data(), data.size()});
  }
  std::vector<char> get(const std::string& key) override {
    int member = 0;
    std::from_chars(key.data(), key.data() + key.size(), member);
    const auto deadline = Clock::now() + in_milliseconds(setup_.timeout_seconds);
    for (auto pause = std::chrono::microseconds(50);; pause = std::min(2 * pause, std::chrono::microseconds(10'000))) {
      if (setup_.store->check(full(key))) break;
      check_end_of(member);
      if (Clock::now() > deadline) fail_waiting_for(member);
      std::this_thread::sleep_for(pause);
    }
    const std::string value = setup_.store->get(full(key));
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) get(key);
  }
  void wait(const std::vector<std::string>& keys, const Milliseconds&) override { wait(keys); }

  /// Throws when the member has ended, or another has found the group broken. The first that any member finds is what
  /// all say: others may have left since, for that reason.
  void check_end_of(int member) const {
    const std::string ended = ended_key(setup_.ranks[static_cast<std::size_t>(member)]);
    Store& store = *setup_.store;
    Reason reason;
    if (store.check(lost_key(setup_)))
      reason = Reason::from_text(setup_, store.get(lost_key(setup_)));
    else if (store.check(ended))
      reason = publish(setup_, {{member}, store.get(ended)});
    else
      return;
    if (!reason.ranks.empty()) member = reason.ranks.front();
    throw CommError(member, fmt::format("{}{} {} while this rank made the group", me(), setup_.rank_name(member),
                                        reason.how.empty() ? "was waited for in vain" : reason.how));
  }
  std::string full(const std::string& key) const { return setup_.name + "/gloo/" + key; }
  [[noreturn]] void fail_waiting_for(int member) const {
    throw CommError(member,
                    fmt::format("{}waited {} s for {} to make the group; every rank of the job must call new_group, "
                                "in the same order",
                                me(), setup_.timeout_seconds, setup_.rank_name(member)));
  }

 private:
  using Store = tandem::parallel::Store;
  std::string me() const { return who(rank_, static_cast<int>(setup_.ranks.size())); }
  const GroupSetup& setup_;
  int rank_;
};

// This host's address on the way to `host`; empty when there is no way.
std::string local_address_towards(const char* host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(host, "1", &hints, &found) != 0) return {};
  std::string result;
  const int fd = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage local{};
  socklen_t size = sizeof local;
  auto* address = reinterpret_cast<sockaddr*>(&local);
  char text[NI_MAXHOST] = {};
  // Connecting a datagram socket sends nothing; it only chooses the way.
  if (fd >= 0 && connect(fd, found->ai_addr, found->ai_addrlen) == 0 && getsockname(fd, address, &size) == 0 &&
      getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0)
    result = text;
  if (fd >= 0) ::close(fd);
  freeaddrinfo(found);
  return result;
}

// The interface that a variable names, or else that on the way to the store.
gloo::transport::tcp::attr device_address(const std::string& store_host) {
  gloo::transport::tcp::attr a;
  for (const char* variable : {"TANDEM_INTERFACE", "GLOO_SOCKET_IFNAME"})
    if (const std::optional<std::string> interface = text_from_environment(variable)) {
      a.iface = *interface;
      return a;
    }
  if (!store_host.empty()) a.hostname = local_address_towards(store_host.c_str());
  if (a.hostname.empty()) a.hostname = "127.0.0.1";
  return a;
}

// The connections of a group. Gloo's own connectFullMesh does not notice when a peer ends, and waits for five timeouts.
class Connections final : public gloo::Context {
 public:
  using gloo::Context::Context;
  void connect(const GroupSetup& setup, const std::shared_ptr<gloo::transport::Device>& device) {
    StoreAdapter store(setup, rank);
    device_ = device;
    transportContext_ = device->createContext(rank, size);
    transportContext_->setTimeout(getTimeout());
    std::vector<char> addresses;  // for each peer its own
    std::size_t bytes = 0;
    for_peers([&](int r) {
      const std::vector<char> address = transportContext_->createPair(r)->address().bytes();
      bytes = address.size();
      addresses.resize(bytes * static_cast<std::size_t>(size));
      std::copy(address.begin(), address.end(), part(addresses, bytes, r));
    });
    store.set(std::to_string(rank), addresses);
    for_peers([&](int r) {
      std::vector<char> theirs = store.get(std::to_string(r));
      check(theirs.size() == addresses.size(), "gloo", "the addresses of rank {} are not understood", r);
      const auto mine = part(theirs, bytes, rank);
      connect(store, r, {mine, mine + static_cast<std::ptrdiff_t>(bytes)}, setup.timeout_seconds);
    });
    store.set(fmt::format("{}/connected", rank), {});
    for_peers([&](int r) { store.get(fmt::format("{}/connected", r)); });
    std::vector<std::string> keys;
    for (int r = 0; r < size; ++r) {
      keys.push_back(store.full(std::to_string(r)));
      keys.push_back(store.full(fmt::format("{}/connected", r)));
    }
    done_with_keys(setup, keys);
  }

 private:
  template <class Body>
  void for_peers(const Body& body) const {
    for (int r = 0; r < size; ++r)
      if (r != rank) body(r);
  }
  static std::vector<char>::iterator part(std::vector<char>& all, std::size_t bytes, int r) {
    return all.begin() + static_cast<std::ptrdiff_t>(bytes) * r;
  }
  // A thread looks after the peer meanwhile, and closes the connection where there is no use in waiting on.
  void connect(const StoreAdapter& store, int peer, const std::vector<char>& address, double seconds) {
    std::exception_ptr error, gloos_error;
    {
      std::mutex mutex;
      std::condition_variable_any changed;
      const std::jthread watcher([&](const std::stop_token& stop) {
        std::unique_lock lock(mutex);
        const auto deadline = Clock::now() + in_milliseconds(seconds);
        while (!changed.wait_for(lock, stop, kLook, [&] { return stop.stop_requested(); }) && !stop.stop_requested()) {
          try {
            if (!error) store.check_end_of(peer);
            if (!error && Clock::now() > deadline) store.fail_waiting_for(peer);
          } catch (...) {
            error = std::current_exception();
          }
          if (error) getPair(peer)->close();
        }
      });
      try {
        getPair(peer)->connect(address);
      } catch (...) {
        gloos_error = std::current_exception();
      }
    }
    if (error || gloos_error) std::rethrow_exception(error ? error : gloos_error);
  }
};

// Throws for a member that ends before or within a second: its connections end a little earlier than the store knows.
void check_ended(const GroupSetup& setup, int rank) {
  const StoreAdapter store(setup, rank);
  for (const auto give_up = Clock::now() + std::chrono::seconds(1); Clock::now() < give_up;
       std::this_thread::sleep_for(Milliseconds(20)))
    for (int member = 0; member < static_cast<int>(setup.ranks.size()); ++member)
      if (member != rank) store.check_end_of(member);
}

}  // namespace

std::shared_ptr<gloo::Context> connect_gloo(const GroupSetup& setup, int rank) {
  const int size = static_cast<int>(setup.ranks.size());
  try {
    const std::shared_ptr<gloo::transport::Device> device =
        gloo::transport::tcp::CreateDevice(device_address(setup.store_host));
    const auto connections = std::make_shared<Connections>(rank, size);
    connections->setTimeout(in_milliseconds(setup.timeout_seconds));
    if (size > 1) connections->connect(setup, device);
    return connections;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    check_ended(setup, rank);
    throw CommError(-1, fmt::format("{}Gloo cannot connect the group: {}; TANDEM_INTERFACE names the network interface "
                                    "to use",
                                    who(rank, size), e.what()));
  }
}

}  // namespace tandem::parallel
