// Gloo as a Mesh: its TCP transport, and its rendezvous over our store.

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>

#include <gloo/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>

#include <tandem/parallel/comm/mesh.h>
#include <tandem/parallel/comm/mesh_reason.h>
#include <tandem/parallel/comm/store_limits.h>

namespace tandem::parallel {
namespace {

using Clock = std::chrono::steady_clock;
using gloo::transport::UnboundBuffer;
using Milliseconds = std::chrono::milliseconds;

constexpr auto kTick = Milliseconds(100);
// Gloo does not always tell a send that is under way that its connection has ended. After so many ticks a rank that has
// ended, says the store, is not waited for any more; what it had sent before would be here.
constexpr int kTicksAfterEnd = 8;

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
    const std::string lost = lost_key(setup_), ended = ended_key(setup_.ranks[static_cast<std::size_t>(member)]);
    Store& store = *setup_.store;
    std::string reason;
    if (store.check(lost))
      reason = store.get(lost);
    else if (store.check(ended))
      reason = store.compare_set(lost, "", fmt::format("{}|{}", member, store.get(ended)));
    else
      return;
    std::from_chars(reason.data(), reason.data() + reason.size(), member);
    const std::string how = reason.substr(std::min(reason.find('|') + 1, reason.size()));
    throw CommError(member, fmt::format("{}rank {} {} while this rank made the group", me(), member,
                                        how.empty() ? "was waited for in vain" : how));
  }
  [[noreturn]] void fail_waiting_for(int member) const {
    throw CommError(member, fmt::format("{}waited {} s for rank {} to make the group; every rank of the job must call "
                                        "new_group, in the same order",
                                        me(), setup_.timeout_seconds, member));
  }

 private:
  using Store = tandem::parallel::Store;
  std::string full(const std::string& key) const { return setup_.name + "/gloo/" + key; }
  std::string me() const { return who(rank_, static_cast<int>(setup_.ranks.size())); }
  const GroupSetup& setup_;
  int rank_;
};

const char* variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? nullptr : text;
}

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
  const char* interface = variable("TANDEM_INTERFACE");
  if (interface == nullptr) interface = variable("GLOO_SOCKET_IFNAME");
  if (interface != nullptr) {
    a.iface = interface;
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
        while (!changed.wait_for(lock, stop, kTick, [&] { return stop.stop_requested(); }) && !stop.stop_requested()) {
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

struct Pending {
  int peer = 0;
  bool sends = false, done = false;
  std::unique_ptr<UnboundBuffer> buffer = {};

  void interrupt() const { sends ? buffer->abortWaitSend() : buffer->abortWaitRecv(); }
  // False when interrupted. Gloo ends all connections when the time is over.
  bool wait(Milliseconds time) const { return sends ? buffer->waitSend(time) : buffer->waitRecv(time); }
};

class GlooMesh final : public Mesh {
 public:
  GlooMesh(const GroupSetup& setup, int rank);
  ~GlooMesh() override;
  GlooMesh(const GlooMesh&) = delete;
  GlooMesh& operator=(const GlooMesh&) = delete;
  void exchange(int lane, const std::vector<Transfer>& sends, const std::vector<Transfer>& receives,
                double seconds) override;
  void abandon() override;
  void close() override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// An exchange that is under way.
struct Exchange {
  Clock::time_point deadline;
  const Pending* waiting = nullptr;  // of its transfers, the one that is waited for
  int ticks_after_end = 0;           // of that one's peer
};

struct GlooMesh::State {
  std::shared_ptr<Store> store;
  std::vector<int> ranks;  // in the job
  std::string lost_key;
  std::shared_ptr<Connections> context;

  // While transfers are waited for, the ticker interrupts the waits now and then, so that the connections of the other
  // transfers are looked at too.
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::tuple<int, int, bool>, std::uint64_t> transfers;  // so far, by lane, peer and direction
  std::vector<Exchange*> exchanges;
  const Exchange* failed_first = nullptr;  // for what it failed, all others fail
  std::optional<ExchangeError> error;      // and this is what all throw
  bool stopping = false, abandoned = false;
  std::thread ticker;

  // Where the next transfer of a lane meets the other side.
  std::uint64_t next_slot(int lane, int peer, bool is_send) {
    const std::lock_guard lock(mutex);
    return static_cast<std::uint64_t>(lane) << 40 | transfers[{lane, peer, is_send}]++;
  }

  // Asks the store on this thread, since the answer may take longer than the wait.
  void tick() {
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, kTick, [this] { return stopping; })) {
      std::map<int, bool> ended;  // by peer
      for (const Exchange* e : exchanges)
        if (e->waiting != nullptr) ended[e->waiting->peer] = false;
      if (ended.empty()) continue;
      lock.unlock();
      for (auto& [peer, has] : ended) has = has_ended(peer);
      lock.lock();
      for (Exchange* e : exchanges) {
        if (e->waiting == nullptr) continue;
        if (ended[e->waiting->peer]) ++e->ticks_after_end;
        e->waiting->interrupt();
      }
    }
  }
  bool has_ended(int peer) const {
    const int in_job = ranks[static_cast<std::size_t>(peer)];
    try {
      return store->check(lost_key) || store->check(ended_key(in_job));
    } catch (const CommError& e) {
      return e.rank() == in_job;  // which held the store
    } catch (const Error&) {
      return false;  // the deadline will tell
    }
  }
  void begin(Exchange& e) {
    const std::lock_guard lock(mutex);
    exchanges.push_back(&e);
  }
  void watch(Exchange& e, const Pending* pending) {
    const std::lock_guard lock(mutex);
    if (pending == nullptr || e.waiting == nullptr || pending->peer != e.waiting->peer) e.ticks_after_end = 0;
    e.waiting = pending;
  }
  // Throws when there is no use in waiting on.
  void check_use(const Exchange& e) {
    const std::lock_guard lock(mutex);
    check(!abandoned, "gloo", "the group was destroyed");
    check(e.ticks_after_end < kTicksAfterEnd, "gloo", "its process has ended");
  }
  // The first exchange that fails ends all connections, and thus all others. Of those whose time is over Gloo has ended
  // them already.
  void note_failure(const Exchange& e) {
    const std::lock_guard lock(mutex);
    if (failed_first != nullptr || error) return;
    failed_first = &e;
    for (const Exchange* other : exchanges)
      if (other->deadline < failed_first->deadline && Clock::now() >= other->deadline) failed_first = other;
  }
  // What the exchange throws, if anything.
  std::optional<ExchangeError> end(Exchange& e, const ExchangeError& own) {
    std::unique_lock lock(mutex);
    std::erase(exchanges, &e);
    const bool failed = !own.peers.empty(), is_first = failed_first == &e;
    if (is_first) {
      failed_first = nullptr;
      if (failed) error = own;
      changed.notify_all();
    }
    if (!failed) return std::nullopt;
    changed.wait(lock, [this] { return failed_first == nullptr; });
    if (is_first || !error) return own;
    ExchangeError echo = *error;
    echo.echo = true;
    return echo;
  }
};

GlooMesh::GlooMesh(const GroupSetup& setup, int rank) : state_(std::make_unique<State>()) {
  const int size = static_cast<int>(setup.ranks.size());
  const NoBrokenPipeSignal no_signal;
  state_->store = setup.store;
  state_->ranks = setup.ranks;
  state_->lost_key = lost_key(setup);
  try {
    std::shared_ptr<gloo::transport::Device> device =
        gloo::transport::tcp::CreateDevice(device_address(setup.store_host));
    state_->context = std::make_shared<Connections>(rank, size);
    state_->context->setTimeout(in_milliseconds(setup.timeout_seconds));
    if (size > 1) state_->context->connect(setup, device);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    check_ended(setup, rank);
    throw CommError(-1, fmt::format("{}Gloo cannot connect the group: {}; TANDEM_INTERFACE names the network interface "
                                    "to use",
                                    who(rank, size), e.what()));
  }
  state_->ticker = std::thread([s = state_.get()] { s->tick(); });
}

GlooMesh::~GlooMesh() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->changed.notify_all();
  if (state_->ticker.joinable()) state_->ticker.join();
  // Connections that have not failed end softly: what is on its way arrives.
}

void GlooMesh::abandon() {
  const std::lock_guard lock(state_->mutex);
  state_->abandoned = true;
  for (const Exchange* e : state_->exchanges)
    if (e->waiting != nullptr) e->waiting->interrupt();
}

void GlooMesh::close() {
  const NoBrokenPipeSignal no_signal;
  try {
    if (state_->context->size > 1) state_->context->closeConnections();
  } catch (const std::exception&) {  // it is closed already
  }
}

void GlooMesh::exchange(int lane, const std::vector<Transfer>& sends, const std::vector<Transfer>& receives,
                        double seconds) {
  Exchange self{Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))};
  ExchangeError error;
  // Notes the peer when body() throws.
  const auto attempt = [&](int peer, const auto& body) {
    try {
      body();
    } catch (const std::exception& e) {
      state_->note_failure(self);
      if (error.text.empty()) error.text = e.what();
      if (std::find(error.peers.begin(), error.peers.end(), peer) == error.peers.end()) error.peers.push_back(peer);
    }
  };
  std::vector<Pending> all;
  all.reserve(sends.size() + receives.size());
  state_->begin(self);
  const auto post = [&](const Transfer& t, bool is_send) {
    if (t.bytes == 0) return;
    attempt(t.peer, [&] {
      const std::uint64_t slot = state_->next_slot(lane, t.peer, is_send);
      Pending p{.peer = t.peer, .sends = is_send, .buffer = state_->context->createUnboundBuffer(t.data, t.bytes)};
      is_send ? p.buffer->send(t.peer, slot) : p.buffer->recv(t.peer, slot);
      all.push_back(std::move(p));
    });
  };
  for (const Transfer& t : receives) post(t, false);
  for (const Transfer& t : sends) post(t, true);

  for (Pending& p : all)
    attempt(p.peer, [&] {
      state_->watch(self, &p);
      while (error.peers.empty()) {
        state_->check_use(self);
        // Rounded up: when Gloo says that the time is over, it is.
        const auto left = std::chrono::ceil<Milliseconds>(self.deadline - Clock::now());
        if ((p.done = p.wait(std::max(left, Milliseconds(1))))) break;
        for (const Pending& other : all)
          if (!other.done && &other != &p)
            attempt(other.peer, [&] {
              other.interrupt();
              (void)other.wait(Milliseconds(1));
            });
      }
    });
  state_->watch(self, nullptr);
  if (!error.peers.empty()) {
    error.late = Clock::now() >= self.deadline;
    // After a failure no wait lasts: what was under way has failed, too. What is done tells who is not to blame.
    for (Pending& p : all)
      if (!p.done) attempt(p.peer, [&] { p.done = p.wait(Milliseconds(1)); });
  }
  if (const auto failure = state_->end(self, error)) throw *failure;
}

}  // namespace

std::unique_ptr<Mesh> make_gloo_mesh(const GroupSetup& setup, int rank) {
  return std::make_unique<GlooMesh>(setup, rank);
}

std::shared_ptr<ProcessGroup> make_gloo_group(const GroupSetup& setup) {
  return make_mesh_group(setup, "gloo", make_gloo_mesh);
}

}  // namespace tandem::parallel
