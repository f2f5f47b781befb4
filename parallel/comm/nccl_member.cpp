#include <tandem/parallel/comm/nccl_member.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/format.h>

#include <tandem/parallel/comm/clock.h>
#include <tandem/parallel/comm/mesh_keys.h>
#include <tandem/parallel/comm/mesh_reason.h>
#include <tandem/parallel/comm/peer_errors.h>
#include <tandem/parallel/comm/peer_wait.h>
#include <tandem/parallel/comm/store_limits.h>
#include <tandem/tensor/cuda.h>

namespace tandem::parallel {
namespace {

constexpr auto kLookTime = std::chrono::milliseconds(20);  // between looks of the watchdog
constexpr auto kLookTimeOfGraphs = std::chrono::milliseconds(200);
// Only a collective that lasts for so long makes the watchdog ask the store.
constexpr double kPatience = 0.1;
// How long a rank that has ended well may have left its share of a collective on its way.
constexpr double kLeftSeconds = 0.3;

}  // namespace

// A lock is open until this is destroyed.
class NcclMember::Opened {
 public:
  explicit Opened(Lock& lock) : lock_(lock) { lock_.unlock(); }
  ~Opened() { lock_.lock(); }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

 private:
  Lock& lock_;
};

// Why nothing succeeds any more. Graphs that recorded collectives ask for it too, and may live longer than the member.
struct NcclMember::Failure {
  const Device device;
  const std::string who;
  std::mutex mutex = {};
  std::exception_ptr error = nullptr, later = nullptr;  // thrown the first time, and from then on
  bool told = false, left = false;

  void set(const std::exception_ptr& first, bool says_all) {
    const std::lock_guard lock(mutex);
    error = later = first;
    if (says_all) return;
    try {
      std::rethrow_exception(first);
    } catch (const CommError& e) {
      std::string_view text = e.what();
      if (text.starts_with(who)) text.remove_prefix(who.size());
      later = std::make_exception_ptr(CommError(
          e.rank(), fmt::format("{}an earlier collective failed, so that the group has no more collectives on GPUs; if "
                                "no rank was lost, call destroy_process_group and init_process_group on every rank, "
                                "and make models and graphs anew: {}",
                                who, text)));
    } catch (...) {
    }
  }
  // Does nothing where there is none.
  void rethrow() {
    const std::lock_guard lock(mutex);
    if (!error) return;
    forget_broken(device, error);
    std::rethrow_exception(std::exchange(told, true) ? later : error);
  }
  void check_replay() {
    rethrow();
    const std::lock_guard lock(mutex);
    check(!left, "Graph",
          "a collective of this graph belongs to a process group that was left; make group, model and graph anew");
  }
};

NcclMember::NcclMember(const GroupSetup& setup, Device device)
    : setup_(setup),
      rank_(setup.place()),
      table_(nccl_module()),
      stream_(device),
      failure_(new Failure{.device = device, .who = who(rank_, size())}),
      link_(table_.make_link(device.index(), rank_, static_cast<int>(setup.ranks.size()))) {}

NcclMember::~NcclMember() { leave(); }

void NcclMember::leave() {
  if (!link_) return;  // it has left already
  {
    const std::lock_guard lock(failure_->mutex);
    failure_->left = true;
  }
  if (connected_ && !ends_at_once()) finish();
  {
    const Lock lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (watchdog_.joinable()) watchdog_.join();
  std::deque<std::shared_ptr<Flight>> left;  // go last, without the lock, since they free tensors
  const Lock lock(mutex_);
  forget_broken(device(), aborted_);
  // When the process ends, CUDA may have gone already, and takes everything with it.
  static auto* const kept = new std::vector<std::unique_ptr<NcclLink>>();
  if (link_ && process_ends())
    kept->push_back(std::move(link_));
  else
    abort_link(lock);
  link_.reset();
  left.swap(flights_);
}

std::vector<int> NcclMember::others() const {
  std::vector<int> result;
  for (int r = 0; r < size(); ++r)
    if (r != rank_) result.push_back(r);
  return result;
}

void NcclMember::connect(const Fingerprint& call) {
  Lock lock(mutex_);
  check_usable(lock);
  last_ = call;
  try {
    const std::string key = setup_.name + "/id";
    if (rank_ == 0) setup_.store->set(key, link_->new_id());
    std::string id;
    {
      const Opened opened(lock);
      id = PeerWait(setup_).value_of(key, 0, [&] {
        if (setup_.store->check(lost_key(setup_))) throw explain(setup_, rank_, {.peers = {0}, .text = "no id"}, call);
      });
    }
    link_->begin_connect(id);
    settle(lock, call);
    const Opened opened(lock);
    done_with_keys(setup_, {key});
  } catch (const CommError&) {
    std::rethrow_exception(abort_now(lock, std::current_exception()));
  } catch (const Error& e) {  // of NCCL here; the others learn it
    publish(setup_, {.ranks = {rank_}, .how = fmt::format("cannot connect on {}: {}", device(), e.what())});
    std::rethrow_exception(abort_now(
        lock,
        std::make_exception_ptr(CommError(
            rank_, fmt::format("{}cannot connect on {} for {}: {}; each rank of a process group over nccl needs a "
                               "device of its own, as local_device() gives (two processes may share one for a "
                               "test where NCCL_HOSTID differs between them)",
                               who(rank_, size()), device(), describe(call), e.what())))));
  }
  connected_ = true;
  watchdog_ = std::thread([this] { watch(); });
}

void NcclMember::settle(Lock& lock, const Fingerprint& call) {
  const double begin = clock_seconds();
  for (auto pause = std::chrono::microseconds(1);; pause = std::min(2 * pause, std::chrono::microseconds(5000))) {
    check_usable(lock);
    if (link_->poll()) return;
    const bool late = clock_seconds() - begin > setup_.timeout_seconds;
    const int lost = !late && pause >= std::chrono::microseconds(1000) ? lost_peer(lock) : -1;
    if (late || lost >= 0) give_up(lock, lost >= 0 ? std::vector{lost} : others(), late, "NCCL does not go on", call);
    check_usable(lock);
    const Opened opened(lock);
    std::this_thread::sleep_for(pause);
  }
}

std::shared_ptr<Flight> NcclMember::launch(const Collective& c, const Fingerprint& call, const Work& host) {
  auto flight = std::make_shared<Flight>();
  flight->call = call;
  flight->host = host;
  flight->tensors = {c.input, c.output};
  flight->captured = cuda::module("nccl").is_capturing(device().index());
  if (flight->captured) cuda::module("nccl").at_replay([failure = failure_] { failure->check_replay(); });
  {
    const Lock lock(mutex_);
    in_capture_ = flight->captured;
  }
  flight->start = cuda::Moment(device());
  bool given = false;
  std::exception_ptr error;
  {
    const cuda::OnStream on_stream(stream_);
    flight->start.hold_up(device());
    try {
      given = give(c, call);
    } catch (...) {
      error = std::current_exception();
    }
    flight->end = cuda::Moment(device());
  }
  if (!given) {  // its tensors are free now, and the stream may still be at work on them
    flight->end.hold_up(device());
    if (error) std::rethrow_exception(error);
    return nullptr;
  }
  {
    const Lock lock(mutex_);
    captured_ = captured_ || flight->captured;
    if (!flight->captured) flights_.push_back(flight);
  }
  changed_.notify_all();
  return flight;
}

bool NcclMember::give(const Collective& c, const Fingerprint& call) {
  Collective dense = c;
  dense.make_dense();
  {
    Lock lock(mutex_);
    if (aborted_ || closed_) return false;
    last_ = call;
    const std::int64_t parts = dense.operation == Operation::all_to_all ? size() : 1;
    if (call.count > 0) {
      link_->begin({.operation = dense.operation,
                    .op = dense.op,
                    .dtype = static_cast<DType>(call.dtype),
                    .root = dense.root,
                    .count = call.count / parts,
                    .input = dense.input.defined() ? dense.input.raw().data : nullptr,
                    .output = dense.output.defined() ? dense.output.raw().data : nullptr},
                   stream_.get());
      settle(lock, call);
    }
  }
  dense.finish();
  return true;
}

void NcclMember::join(const std::shared_ptr<Flight>& flight) {
  std::vector<Tensor> tensors;  // go without the lock
  const Lock lock(mutex_);
  if (flight && !aborted_) flight->end.hold_up(device());
  failure_->rethrow();
  if (closed_) std::rethrow_exception(closed_);
  flight->joined = true;
  tensors.swap(flight->tensors);  // from now on they are used in the order of this thread's stream
}

void NcclMember::join_all() {
  const Lock lock(mutex_);
  // A stream that records cannot wait for what runs.
  if (aborted_ || flights_.empty() || cuda::module("nccl").is_capturing(device().index())) return;
  flights_.back()->end.hold_up(device());
  for (const auto& flight : flights_) flight->joined = true;
}

bool NcclMember::is_done(const Flight& flight) {
  const Lock lock(mutex_);
  return aborted_ || flight.captured || flight.end.done();
}

void NcclMember::close(const std::string& message) {
  const Lock lock(mutex_);
  if (!closed_)
    closed_ = std::make_exception_ptr(CommError(
        rank_,
        fmt::format("{}took no part in an earlier collective, so that the group has no more collectives on GPUs; "
                    "call destroy_process_group and init_process_group on every rank, and wrap models anew: {}",
                    who(rank_, size()), message)));
}

void NcclMember::abort(const std::exception_ptr& error, bool thrown) {
  Lock lock(mutex_);
  if (!aborted_ && connected_) {
    const Opened opened(lock);
    tell_others(error);
  }
  const std::exception_ptr kept = abort_now(lock, error);
  forget_broken(device(), kept);
  const std::lock_guard failure_lock(failure_->mutex);
  failure_->told = failure_->told || (thrown && kept == error);
}

// A rank that waits for its device alone, for what comes before the call that has failed, learns it sooner.
void NcclMember::tell_others(const std::exception_ptr& error) const {
  constexpr double kSeconds = 0.5;
  const AnswerLimit limit(kSeconds);
  try {
    std::rethrow_exception(error);
  } catch (const CommError& e) {
    const int rank = e.rank() >= 0 ? e.rank() : rank_;
    try {
      publish(setup_, {.ranks = {rank}, .how = fmt::format("was lost ({})", e.what())});
    } catch (const std::exception&) {  // they will find it themselves
    }
  } catch (...) {
  }
}

std::exception_ptr NcclMember::abort_now(const Lock& lock, std::exception_ptr error) {
  if (aborted_) return aborted_;
  aborted_ = closed_ ? closed_ : std::move(error);
  failure_->set(aborted_, closed_ != nullptr);
  const bool awaited = captured_ || std::ranges::any_of(flights_, [](const auto& f) { return f->joined; });
  if (awaited) report_broken(device(), aborted_);  // before anybody is set free
  abort_link(lock);
  changed_.notify_all();
  return aborted_;
}

void NcclMember::abort_link(const Lock&) {
  if (!link_) return;
  try {
    link_->abort();
    // A stream that records tells nothing of what it has done, and what a graph works on is kept by the graph.
    if (in_capture_ || cuda::module("nccl").is_capturing(device().index())) return;
    const auto stopped = [&] {
      const cuda::OnStream on_stream(stream_);
      return cuda::Moment(device());
    }();
    stopped.hold_up(device());
  } catch (const Error&) {  // the device is lost
  }
}

void NcclMember::watch() {
  Lock lock(mutex_);
  while (!ending_) {
    if (!busy(lock))
      changed_.wait(lock, [&] { return ending_ || busy(lock); });
    else if (!changed_.wait_for(lock, flights_.empty() ? kLookTimeOfGraphs : kLookTime, [this] { return ending_; }))
      try {
        look(lock);
      } catch (const std::exception& e) {  // of the device
        abort_now(lock,
                  std::make_exception_ptr(CommError(
                      rank_, fmt::format("{}{} cannot go on: {}", who(rank_, size()), describe(last_), e.what()))));
      }
  }
}

void NcclMember::look(Lock& lock) {
  std::vector<std::shared_ptr<Flight>> done;
  while (!flights_.empty() && flights_.front()->end.done()) {
    done.push_back(std::move(flights_.front()));
    flights_.pop_front();
  }
  if (!done.empty()) {
    const Opened opened(lock);
    done.clear();  // frees tensors
  }
  if (!busy(lock) || ending_) return;
  const Fingerprint call = flights_.empty() ? last_ : flights_.front()->call;
  try {
    (void)link_->poll();
  } catch (const Error& e) {
    return give_up(lock, others(), false, e.what(), call);
  }
  if (!flights_.empty()) {
    Flight& first = *flights_.front();
    if (first.since == 0 && first.start.done()) first.since = clock_seconds();
    const double seconds = first.since == 0 ? kPatience : clock_seconds() - first.since;
    if (seconds < kPatience) return;
    if (seconds > setup_.timeout_seconds) return give_up(lock, others(), true, "late", call);
  }
  if (const int lost = lost_peer(lock); lost >= 0 && !aborted_ && !ending_)
    give_up(lock, {lost}, false, "has ended", call);
}

NcclMember::End NcclMember::end_of(int peer) const {
  try {
    const std::string key = ended_key(setup_.ranks[static_cast<std::size_t>(peer)]);
    if (setup_.store->check(lost_key(setup_))) return {.peer = peer};
    if (setup_.store->check(key)) return {.peer = peer, .well = ended_well(setup_.store->get(key))};
  } catch (const SilentStore&) {  // the deadline will tell
  } catch (const CommError& e) {  // the store has gone with its holder, and nobody knows how that one has ended
    const auto holder = std::ranges::find(setup_.ranks, e.rank());
    if (e.rank() >= 0 && holder != setup_.ranks.end())
      return {.peer = static_cast<int>(holder - setup_.ranks.begin()), .well = true};
  } catch (const Error&) {
  }
  return {};
}

int NcclMember::lost_peer(Lock& lock) {
  if (size() == 1) return -1;
  asked_ = (asked_ + 1) % size();
  if (asked_ == rank_) asked_ = (asked_ + 1) % size();
  const auto first = [this] { return flights_.empty() ? nullptr : flights_.front(); };
  const int peer = asked_;
  const auto running = first();
  End end;
  {
    const Opened opened(lock);
    end = end_of(peer);
  }
  return end.peer >= 0 && (!end.well || is_waited_for(lock, running.get(), first().get())) ? end.peer : -1;
}

// Whether something has waited so long that what it waits for cannot be on its way any more. Of graphs it is only known
// whether the device gets done what it was given, which may be other work.
bool NcclMember::is_waited_for(const Lock&, const void* before, const void* now) {
  if (before != now) return false;
  const bool in_graph = connected_ && now == nullptr;
  const void* const waiting = now != nullptr ? now : this;
  if (std::exchange(doubted_, waiting) != waiting) {
    doubted_since_ = clock_seconds();
    doubted_moment_ =
        in_graph && !cuda::module("nccl").is_capturing(device().index()) ? cuda::Moment(device()) : cuda::Moment();
  }
  if (!in_graph) return clock_seconds() - doubted_since_ > kLeftSeconds;
  if (!doubted_moment_.done()) return clock_seconds() - doubted_since_ > setup_.timeout_seconds;
  doubted_ = nullptr;
  return false;
}

void NcclMember::give_up(Lock& lock, const std::vector<int>& peers, bool late, const std::string& text,
                         const Fingerprint& call) {
  std::exception_ptr error;
  {
    const Opened opened(lock);
    try {
      error = std::make_exception_ptr(
          explain(setup_, rank_, {.peers = peers, .late = late, .echo = false, .text = text}, call));
    } catch (...) {
      error = std::current_exception();
    }
  }
  abort_now(lock, error);
}

void NcclMember::drain(Lock& lock) const {
  for (auto pause = std::chrono::microseconds(10); !aborted_ && !flights_.empty() && !flights_.back()->end.done();
       pause = std::min(2 * pause, std::chrono::microseconds(1000))) {
    const Opened opened(lock);
    std::this_thread::sleep_for(pause);
  }
}

void NcclMember::finish() {
  std::vector<std::shared_ptr<Flight>> left;
  {
    const Lock lock(mutex_);
    left.assign(flights_.begin(), flights_.end());
  }
  for (const auto& flight : left) try {
      flight->host.wait();
    } catch (...) {
      abort(std::current_exception(), false);
    }
  Lock lock(mutex_);
  drain(lock);
  if (aborted_ || closed_) return;
  try {
    link_->begin_finalize();
    settle(lock, last_);
    link_->destroy();
    link_.reset();
  } catch (const Error&) {
    abort_now(lock, std::current_exception());
  }
}

void* NcclMember::allocate(std::size_t bytes) {
  const Lock lock(mutex_);
  failure_->rethrow();
  try {
    return link_->allocate(bytes);
  } catch (const Error&) {
    return nullptr;
  }
}

void NcclMember::share(void* memory, std::size_t bytes) {
  Lock lock(mutex_);
  drain(lock);  // what was given before must not find the new memory on some ranks only
  check_usable(lock);
  link_->begin_share(memory, bytes);
  settle(lock, last_);
  link_->end_share(memory, bytes);
}

void NcclMember::unshare(void* memory) {
  {
    Lock lock(mutex_);
    drain(lock);
  }
  cuda::synchronize(device());  // of what graphs replay, too; without the lock, since the watchdog may have to end it
  const Lock lock(mutex_);
  if (link_ && !aborted_) link_->unshare(memory);
}

}  // namespace tandem::parallel
