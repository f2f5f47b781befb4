// Gloo as a Mesh: exchanges over its connections.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>

#include <gloo/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <tandem/parallel/comm/clock.h>
#include <tandem/parallel/comm/gloo_connections.h>
#include <tandem/parallel/comm/mesh.h>
#include <tandem/parallel/comm/mesh_keys.h>

namespace tandem::parallel {
namespace {

using Clock = std::chrono::steady_clock;
using gloo::transport::UnboundBuffer;
using Milliseconds = std::chrono::milliseconds;

constexpr auto kTick = Milliseconds(100);
constexpr double kAskSeconds = 0.5;  // at most, for what the ticker asks the store
// Gloo does not always tell a send that is under way that its connection has ended. After so many ticks a rank that has
// ended, says the store, is not waited for any more; what it had sent before would be here.
constexpr int kTicksAfterEnd = 8;

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
  explicit State(const GroupSetup& s) : setup(s) {}

  const GroupSetup setup;
  std::shared_ptr<gloo::Context> context;

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
      {
        const AnswerLimit limit(kAskSeconds);
        for (auto& [peer, has] : ended) has = is_lost(setup, peer);
      }
      lock.lock();
      for (Exchange* e : exchanges) {
        if (e->waiting == nullptr) continue;
        if (ended[e->waiting->peer]) ++e->ticks_after_end;
        e->waiting->interrupt();
      }
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

GlooMesh::GlooMesh(const GroupSetup& setup, int rank) : state_(std::make_unique<State>(setup)) {
  const NoBrokenPipeSignal no_signal;
  state_->context = connect_gloo(setup, rank);
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
  Exchange self{Clock::now() + clock_ticks(seconds)};
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
