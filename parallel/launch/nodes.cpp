#include <tandem/parallel/launch/nodes.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <fmt/format.h>

#include <tandem/parallel/comm/clock.h>
#include <tandem/parallel/comm/process_group.h>
#include <tandem/parallel/comm/secret.h>
#include <tandem/parallel/comm/store_limits.h>
#include <tandem/parallel/comm/tcp_store.h>

namespace tandem::parallel {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

const std::string kStartKey = std::string(kLauncherPrefix) + "start";
constexpr auto kBeatTime = milliseconds(500);           // between signs of life
constexpr auto kStorePause = milliseconds(100);         // between looks into the store
constexpr auto kRefusedTime = std::chrono::seconds(1);  // a host that refuses connections for so long has no store
constexpr auto kAudibleTime = milliseconds(500);        // since the last answer
constexpr auto kPausedTime = std::chrono::seconds(1);   // a longer pause: this launcher was stopped, not the others
constexpr auto kLastWait = std::chrono::seconds(5);
constexpr double kStoreSeconds = 2;  // for one request of a launcher; the job's timeout is for silence as a whole

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

std::string list_of(const std::vector<int>& numbers, std::string_view one, std::string_view several) {
  return fmt::format("{} {}", numbers.size() == 1 ? one : several, fmt::join(numbers, " and "));
}

}  // namespace

struct Nodes::State {
  LaunchOptions options;
  std::string secret;
  int restart_count = 0;
  Layout layout;
  std::string host = host_name();
  bool joined = true;

  std::unique_ptr<TCPStore> store;
  std::vector<Arrival> members;
  std::vector<int> first_ranks;
  // Of the thread alone, as is the store once it runs.
  std::vector<std::string> beats;
  std::vector<Clock::time_point> heard;
  Clock::time_point refused{}, verdict_time{};

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::pair<std::string, std::string>> outbox;
  std::optional<Failure> failure;
  Clock::time_point failed_at{};
  std::vector<int> lost;
  bool done = false, posted = false, settled = false, again = false, stopping = false;
  std::thread thread;

  bool alone() const { return options.nnodes == 1; }
  int me() const { return options.node_rank; }
  std::string name() const { return fmt::format("node {} of {}", me(), options.nnodes); }
  std::string key(std::string_view what, int node) const {
    return fmt::format("{}{}/{}/{}", kLauncherPrefix, restart_count, what, node);
  }
  std::string key(std::string_view what) const { return fmt::format("{}{}/{}", kLauncherPrefix, restart_count, what); }
  // The value, or "" when there is none, without waiting.
  std::string read(const std::string& k) const { return store->compare_set(k, "?", "?"); }
  bool is_lost(int node) const {
    const std::lock_guard lock(mutex);
    return std::find(lost.begin(), lost.end(), node) != lost.end();
  }
  // With the lock held.
  void post(const std::string& k, const std::string& value) {
    outbox.emplace_back(k, value);
    posted = true;
    changed.notify_all();
  }
  void has_failed(const Failure& f) {
    if (!failure) failed_at = Clock::now();
    failure = f;
  }
  bool may_restart(const std::optional<Failure>& f) const {
    return f && !f->final && restart_count < options.max_restarts;
  }

  void connect(Clock::time_point limit, FunctionRef<bool()> stop);
  void meet(Clock::time_point limit, FunctionRef<bool()> stop);
  void arrange();
  void watch();
  void look(Clock::time_point& next_beat);
  void settle(std::string verdict);
  void lose_silent();
  void lose(int node, const std::string& how);
};

// The store of node 0 may come later than this launcher.
void Nodes::State::connect(Clock::time_point limit, FunctionRef<bool()> stop) {
  while (!stop()) {
    const auto begin = Clock::now();
    try {
      store = std::make_unique<TCPStore>(TCPStoreOptions{.host = options.master_addr,
                                                         .port = options.master_port,
                                                         .rank = me(),
                                                         .world_size = options.nnodes,
                                                         .timeout_seconds = kStoreSeconds,
                                                         .secret = secret,
                                                         .restart = -1});
      if (me() == 0) store->set(kStartKey, std::to_string(restart_count));
      // Before node 0 has forgotten the keys of the start before, nothing may be written.
      while (!stop() && read(kStartKey) != std::to_string(restart_count)) {
        if (Clock::now() > limit) throw CommError(0, "it has not begun the restart");
        std::this_thread::sleep_for(kStorePause);
      }
      return;
    } catch (const CommError& e) {
      const bool waited = Clock::now() - begin > std::chrono::duration<double>(0.9 * kStoreSeconds);
      if (!waited) throw CommError(-1, fmt::format("{}: {}", name(), e.what()));
      if (Clock::now() < limit) continue;
      throw CommError(
          -1, fmt::format("{}: waited {} s for the launcher of node 0 at {}:{}, which did not come; see that it "
                          "runs, and that --master-addr and --master-port are the same on every node",
                          name(), options.timeout_seconds, options.master_addr, options.master_port));
    }
  }
}

void Nodes::State::meet(Clock::time_point limit, FunctionRef<bool()> stop) {
  const std::string terms = fmt::format("--nnodes {} --max-restarts {}", options.nnodes, options.max_restarts);
  const std::string mine =
      to_text(Arrival{.terms = terms, .host = host, .token = layout.run_id, .nprocs = options.nprocs});
  const std::string there = store->compare_set(key("join", me()), "", mine);
  if (there != mine)
    throw CommError(-1, fmt::format("{}: host {} has come as node {} already; give each node its own --node-rank",
                                    name(), arrival_from(there).host, me()));
  for (;;) {
    std::vector<int> missing;
    members.clear();
    for (int i = 0; i < options.nnodes; ++i) {
      const std::string text = read(key("join", i));
      members.push_back(arrival_from(text));
      if (text.empty()) missing.push_back(i);
      if (!text.empty() && members.back().terms != terms)
        throw CommError(-1, fmt::format("{}: the nodes disagree: this one was given {}, node {} was given {}", name(),
                                        terms, i, members.back().terms));
    }
    if (missing.empty() || stop()) return;
    if (Clock::now() > limit)
      throw CommError(-1, fmt::format("{}: waited {} s for {}, which did not come; start tandem-run there with the "
                                      "same --nnodes, --master-addr and --master-port; a longer wait is set by "
                                      "--timeout",
                                      name(), options.timeout_seconds, list_of(missing, "node", "nodes")));
    std::this_thread::sleep_for(kStorePause);
  }
}

void Nodes::State::arrange() {
  layout.world_size = 0;
  for (const Arrival& m : members) {
    first_ranks.push_back(layout.world_size);
    layout.world_size += m.nprocs;
  }
  layout.first_rank = first_ranks[static_cast<std::size_t>(me())];
  layout.run_id = members[0].token;
  beats.resize(members.size());
  heard.assign(members.size(), Clock::now());
}

void Nodes::State::lose(int node, const std::string& how) {
  const Arrival& m = members[static_cast<std::size_t>(node)];
  const int first = first_ranks[static_cast<std::size_t>(node)], last = first + m.nprocs - 1;
  const std::string ranks = first == last ? fmt::format("rank {}", first) : fmt::format("ranks {} to {}", first, last);
  const Failure f{.what = fmt::format("node {} of {} with {} {}", node, options.nnodes, ranks, how),
                  .where = fmt::format("host {}", m.host),
                  .final = true};
  bool is_cause = false;  // of what ranks die of after the node's last sign of life
  {
    const std::lock_guard lock(mutex);
    is_cause = !failure || (lost.empty() && failed_at > heard[static_cast<std::size_t>(node)]);
    if (is_cause) has_failed(f);
  }
  if (me() == 0 && is_cause) store->set(key("failure"), to_text(f));  // before ranks learn of it
  if (me() == 0)
    for (int r = first; r <= last; ++r)
      store->set(ended_key(r), fmt::format("was on node {} (host {}), which {}", node, m.host, how));
  const std::lock_guard lock(mutex);
  lost.push_back(node);
  if (node == 0) settled = true;  // there is nobody left to agree with
}

void Nodes::State::look(Clock::time_point& next_beat) {
  std::vector<std::pair<std::string, std::string>> letters;
  {
    const std::lock_guard lock(mutex);
    letters = outbox;
  }
  for (std::size_t sent = 0; sent < letters.size(); ++sent) {
    const auto& [k, value] = letters[sent];
    if (k == key("failure"))
      store->compare_set(k, "", value);
    else
      store->set(k, value);
    const std::lock_guard lock(mutex);
    outbox.erase(outbox.begin());
  }
  const auto now = Clock::now();
  if (now >= next_beat) {
    store->add(key("beat", me()), 1);
    for (int i = 0; i < options.nnodes; ++i) {
      if (i == me() || is_lost(i)) continue;
      const auto at = static_cast<std::size_t>(i);
      const std::string beat = read(key("beat", i));
      if (std::exchange(beats[at], beat) != beat) heard[at] = Clock::now();
      if (i != 0 && !read(launcher_ended_key(i)).empty() && read(key("read", i)).empty())
        lose(i, "has lost its launcher");
    }
    next_beat = now + kBeatTime;
  }
  const std::string verdict = read(key("verdict"));  // before the failure, which it is about
  if (const std::string text = read(key("failure")); !text.empty()) {
    const std::lock_guard lock(mutex);
    if (lost.empty()) has_failed(failure_from(text));
  }
  heard[0] = me() == 0 ? heard[0] : std::max(heard[0], now);  // its store answers
  settle(verdict);
}

// Node 0 says that the start is over when all have said that they are done, and goes when all have read it.
void Nodes::State::settle(std::string verdict) {
  const auto all_have = [&](std::string_view what) {
    for (int i = 0; i < options.nnodes; ++i)
      if (!is_lost(i) && read(key(what, i)).empty()) return false;
    return true;
  };
  bool over = false;
  if (me() == 0) {
    if (verdict.empty() && all_have("done")) {
      const std::lock_guard lock(mutex);
      verdict = may_restart(failure) && lost.empty() ? "restart" : "over";
    } else if (verdict.empty()) {
      return;
    }
    if (verdict_time == Clock::time_point{}) {
      verdict_time = Clock::now();
      store->set(key("verdict"), verdict);
      store->set(key("read", 0), "1");
    }
    over = all_have("read") || Clock::now() > verdict_time + kLastWait;
  } else if (!verdict.empty()) {
    store->set(key("read", me()), "1");
    over = true;
  }
  if (!over) return;
  const std::lock_guard lock(mutex);
  settled = true;
  again = verdict == "restart";
}

void Nodes::State::lose_silent() {
  const auto silence = [this](int node) { return Clock::now() - heard[static_cast<std::size_t>(node)]; };
  const auto limit = std::chrono::duration<double>(options.timeout_seconds);
  for (int i = 0; i < options.nnodes; ++i) {
    // The others are heard through the store of node 0 alone: where that is silent, nothing is known of them.
    const bool audible = i == 0 || me() == 0 || silence(0) < kAudibleTime;
    if (i != me() && audible && !is_lost(i) && silence(i) > limit)
      lose(i, fmt::format("is gone or cut off: nothing was heard from its launcher for {} s", options.timeout_seconds));
  }
}

void Nodes::State::watch() {
  auto next_beat = Clock::now();
  for (;;) {
    {
      std::unique_lock lock(mutex);
      if (stopping || settled) return;
      const auto begin = Clock::now();
      changed.wait_for(lock, kStorePause, [&] { return stopping || posted; });
      if (Clock::now() > begin + kPausedTime) heard.assign(heard.size(), Clock::now());
      posted = false;
    }
    try {
      look(next_beat);
      refused = {};
    } catch (const Error& e) {
      const bool refuses = std::string_view(e.what()).find(
                               std::make_error_code(std::errc::connection_refused).message()) != std::string_view::npos;
      const auto now = Clock::now();
      if (!refuses)
        refused = {};
      else if (refused == Clock::time_point{})
        refused = now;
      else if (now > refused + kRefusedTime && me() != 0)
        lose(0, "has ended, and with it the job's store");
    }
    try {
      lose_silent();
    } catch (const Error&) {  // the store of node 0, in this process, is overloaded: the next look says so again
    }
  }
}

std::string random_run_id() { return to_hex(random_bytes().substr(0, 8)); }

Nodes::Nodes(const LaunchOptions& options, const std::string& secret, const std::string& run_id, int restart,
             FunctionRef<bool()> stop)
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.options = options;
  s.secret = secret;
  s.restart_count = restart;
  s.layout = {.world_size = options.nprocs, .run_id = run_id};
  if (s.alone()) return;
  const auto limit = Clock::now() + clock_ticks(options.timeout_seconds);
  s.connect(limit, stop);
  if (!stop()) s.meet(limit, stop);
  s.joined = !stop();
  if (!s.joined) return;
  s.arrange();
  s.thread = std::thread([&s] { s.watch(); });
}

Nodes::~Nodes() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->changed.notify_all();
  if (state_->thread.joinable()) state_->thread.join();
}

bool Nodes::joined() const { return state_->joined; }
const Layout& Nodes::layout() const { return state_->layout; }

std::string Nodes::here() const {
  return state_->alone() ? fmt::format("host {}", state_->host)
                         : fmt::format("host {}, node {}", state_->host, state_->me());
}

void Nodes::report_end(int rank, const std::string& text) {
  const std::lock_guard lock(state_->mutex);
  state_->post(ended_key(rank), text);
}

void Nodes::report_failure(const Failure& failure) {
  const std::lock_guard lock(state_->mutex);
  if (!state_->failure) state_->has_failed(failure);
  if (!state_->alone()) state_->post(state_->key("failure"), to_text(failure));
}

std::optional<Failure> Nodes::failure() const {
  const std::lock_guard lock(state_->mutex);
  return state_->failure;
}

void Nodes::report_done() {
  const std::lock_guard lock(state_->mutex);
  if (std::exchange(state_->done, true)) return;
  if (!state_->alone()) {
    state_->post(state_->key("done", state_->me()), "1");
    return;
  }
  state_->settled = true;
  state_->again = state_->may_restart(state_->failure);
}

bool Nodes::settled() const {
  const std::lock_guard lock(state_->mutex);
  return state_->settled;
}

bool Nodes::restart() const {
  const std::lock_guard lock(state_->mutex);
  return state_->again;
}

}  // namespace tandem::parallel
