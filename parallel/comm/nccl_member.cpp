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

namespace tandem::parallel {
namespace {

constexpr auto kLookTime = std::chrono::milliseconds(20);  // between looks of the watchdog
constexpr auto kLookTimeOfGraphs = std::chrono::milliseconds(200);
// Only a collective that lasts for so long makes the watchdog ask the store.
constexpr double kPatience = 0.1;
// How long a rank that has ended well may have left its share of a collective on its way.
constexpr double kLeftSeconds = 0.3;

}  // namespace

NcclMember::NcclMember(const GroupSetup& setup, Device device)
    : setup_(setup),
      rank_(setup.place()),
      table_(nccl_module()),
      stream_(device),
      link_(table_.make_link(device.index(), rank_, static_cast<int>(setup.ranks.size()))) {}

NcclMember::~NcclMember() { leave(); }

void NcclMember::leave() {
  if (!link_) return;  // it has left already
  *usable_ = false;
  if (connected_ && !ends_at_once()) finish();
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (watchdog_.joinable()) watchdog_.join();
  flights_.clear();
  forget_broken(device(), broken_);
  // When the process ends, CUDA may have gone already, and takes everything with it.
  static auto* const kept = new std::vector<std::unique_ptr<NcclLink>>();
  if (link_ && process_ends())
    kept->push_back(std::move(link_));
  else if (link_)
    link_->abort();
  link_.reset();
}

void NcclMember::connect(const Fingerprint& call) {
  Lock lock(mutex_);
  check_broken();
  last_ = call;
  try {
    const std::string key = setup_.name + "/id";
    if (rank_ == 0) setup_.store->set(key, link_->new_id());
    lock.unlock();
    const std::string id = PeerWait(setup_).value_of(key, 0, [&] {
      if (setup_.store->check(lost_key(setup_))) throw explain(setup_, rank_, {.peers = {0}, .text = "no id"}, call);
    });
    lock.lock();
    link_->begin_connect(id);
    settle(lock, call);
    lock.unlock();
    done_with_keys(setup_, {key});
    lock.lock();
  } catch (const CommError&) {
    if (!lock.owns_lock()) lock.lock();
    std::rethrow_exception(stop(std::current_exception()));
  } catch (const Error& e) {  // of NCCL here; the others learn it
    if (!lock.owns_lock()) lock.lock();
    publish(setup_, {.ranks = {rank_}, .how = fmt::format("cannot connect on {}: {}", device(), e.what())});
    std::rethrow_exception(stop(std::make_exception_ptr(CommError(
        rank_,
        fmt::format("{}cannot connect on {} for {}: {}; each rank of a process group over nccl needs a device of "
                    "its own, as local_device() gives (two processes may share one for a test where NCCL_HOSTID "
                    "differs between them)",
                    who(rank_, size()), device(), describe(call), e.what())))));
  }
  connected_ = true;
  watchdog_ = std::thread([this] { watch(); });
}

void NcclMember::settle(Lock& lock, const Fingerprint& call) {
  const double begin = clock_seconds();
  std::vector<int> others;
  for (int r = 0; r < size(); ++r)
    if (r != rank_) others.push_back(r);
  for (auto pause = std::chrono::microseconds(1);; pause = std::min(2 * pause, std::chrono::microseconds(5000))) {
    check_broken();
    if (link_->poll()) return;
    const bool late = clock_seconds() - begin > setup_.timeout_seconds;
    const int lost = !late && pause >= std::chrono::microseconds(1000) ? lost_peer(lock) : -1;
    if (late || lost >= 0) {
      give_up(lock, lost >= 0 ? std::vector{lost} : others, late, "NCCL does not go on", call);
      check_broken();
    }
    lock.unlock();
    std::this_thread::sleep_for(pause);
    lock.lock();
  }
}

std::shared_ptr<Flight> NcclMember::launch(const Collective& c, const Fingerprint& call, const Work& host) {
  auto flight = std::make_shared<Flight>();
  flight->call = call;
  flight->host = host;
  flight->tensors = {c.input, c.output};
  flight->captured = cuda::module("nccl").is_capturing(device().index());
  if (flight->captured)
    cuda::module("nccl").at_replay([usable = usable_] {
      check(*usable, "Graph",
            "a collective of this graph belongs to a process group that is broken, or was left; make group, model and "
            "graph anew");
    });
  flight->start = cuda::Moment(device());
  const cuda::OnStream on_stream(stream_);
  flight->start.hold_up(device());
  Collective dense = c;  // goes before the scope of the stream: what was packed is freed in its order
  dense.make_dense();
  {
    Lock lock(mutex_);
    if (broken_ || refused_) return nullptr;
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
  flight->end = cuda::Moment(device());
  {
    const std::lock_guard lock(mutex_);
    captured_ = captured_ || flight->captured;
    if (!flight->captured) flights_.push_back(flight);
  }
  changed_.notify_all();
  return flight;
}

void NcclMember::join(const std::shared_ptr<Flight>& flight) {
  std::vector<Tensor> tensors;  // go without the lock
  const std::lock_guard lock(mutex_);
  if (const std::exception_ptr& error = broken_ ? broken_ : refused_) {
    forget_broken(device(), error);
    std::rethrow_exception(error);
  }
  flight->end.hold_up(device());
  flight->joined = true;
  tensors.swap(flight->tensors);  // from now on they are used in the order of this thread's stream
}

void NcclMember::join_all() {
  const std::lock_guard lock(mutex_);
  if (broken_ || flights_.empty()) return;
  flights_.back()->end.hold_up(device());
  for (const auto& flight : flights_) flight->joined = true;
}

bool NcclMember::is_done(const Flight& flight) {
  const std::lock_guard lock(mutex_);
  return broken_ || flight.captured || flight.end.done();
}

void NcclMember::refuse(const std::string& message) {
  const std::lock_guard lock(mutex_);
  if (!refused_)
    refused_ = std::make_exception_ptr(CommError(
        rank_,
        fmt::format("{}took no part in an earlier collective, so that the group has no more collectives on GPUs; "
                    "call destroy_process_group and init_process_group on every rank, and wrap models anew: {}",
                    who(rank_, size()), message)));
}

void NcclMember::break_off(const std::exception_ptr& error) {
  Lock lock(mutex_);
  if (!broken_ && connected_) {
    lock.unlock();
    tell_others(error);
    lock.lock();
  }
  forget_broken(device(), stop(error));
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

// With the lock closed.
std::exception_ptr NcclMember::stop(std::exception_ptr error) {
  if (broken_) return broken_;
  broken_ = refused_ ? refused_ : std::move(error);
  *usable_ = false;
  const bool awaited = captured_ || std::ranges::any_of(flights_, [](const auto& f) { return f->joined; });
  if (awaited) report_broken(device(), broken_);  // before anybody is set free
  if (link_) link_->abort();
  changed_.notify_all();
  return broken_;
}

void NcclMember::watch() {
  Lock lock(mutex_);
  while (!ending_) {
    if (!busy())
      changed_.wait(lock, [this] { return ending_ || busy(); });
    else if (!changed_.wait_for(lock, flights_.empty() ? kLookTimeOfGraphs : kLookTime, [this] { return ending_; }))
      try {
        look(lock);
      } catch (const std::exception& e) {  // of the device
        if (!lock.owns_lock()) lock.lock();
        stop(std::make_exception_ptr(
            CommError(rank_, fmt::format("{}{} cannot go on: {}", who(rank_, size()), describe(last_), e.what()))));
      }
  }
}

void NcclMember::look(Lock& lock) {
  std::vector<std::shared_ptr<Flight>> done;  // their tensors are freed without the lock
  while (!flights_.empty() && flights_.front()->end.done()) {
    done.push_back(std::move(flights_.front()));
    flights_.pop_front();
  }
  if (!done.empty()) {
    lock.unlock();
    done.clear();
    lock.lock();
  }
  if (!busy() || ending_) return;
  const Fingerprint call = flights_.empty() ? last_ : flights_.front()->call;
  std::vector<int> others;
  for (int r = 0; r < size(); ++r)
    if (r != rank_) others.push_back(r);
  try {
    (void)link_->poll();
  } catch (const Error& e) {
    return give_up(lock, others, false, e.what(), call);
  }
  if (!flights_.empty()) {
    Flight& first = *flights_.front();
    if (first.since == 0 && first.start.done()) first.since = clock_seconds();
    const double seconds = first.since == 0 ? kPatience : clock_seconds() - first.since;
    if (seconds < kPatience) return;
    if (seconds > setup_.timeout_seconds) return give_up(lock, others, true, "late", call);
  }
  if (const int lost = lost_peer(lock); lost >= 0 && !broken_ && !ending_)
    give_up(lock, {lost}, false, "has ended", call);
}

int NcclMember::lost_peer(Lock& lock) {
  if (size() == 1) return -1;
  asked_ = (asked_ + 1) % size();
  if (asked_ == rank_) asked_ = (asked_ + 1) % size();
  const int peer = asked_;
  const auto running = flights_.empty() ? nullptr : flights_.front();
  lock.unlock();
  std::string how;
  bool group_lost = false;
  try {
    const std::string key = ended_key(setup_.ranks[static_cast<std::size_t>(peer)]);
    group_lost = setup_.store->check(lost_key(setup_));
    if (!group_lost && setup_.store->check(key)) how = setup_.store->get(key);
  } catch (const Error&) {  // the deadline will tell
  }
  lock.lock();
  if (group_lost || (!how.empty() && !ended_well(how))) return peer;
  // One that has ended well may have done its part, unless what waits for it does not end.
  const auto still = flights_.empty() ? nullptr : flights_.front();
  if (how.empty() || running != still || (connected_ && running == nullptr)) return -1;
  const void* const waiting = running != nullptr ? static_cast<const void*>(running.get()) : this;
  if (std::exchange(doubted_, waiting) != waiting) doubted_since_ = clock_seconds();
  return clock_seconds() - doubted_since_ > kLeftSeconds ? peer : -1;
}

void NcclMember::give_up(Lock& lock, std::vector<int> peers, bool late, const std::string& text,
                         const Fingerprint& call) {
  if (peers.empty()) peers.push_back(rank_);
  lock.unlock();
  std::exception_ptr error;
  try {
    error = std::make_exception_ptr(
        explain(setup_, rank_, {.peers = std::move(peers), .late = late, .echo = false, .text = text}, call));
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  stop(error);
}

void NcclMember::drain(Lock& lock) const {
  for (auto pause = std::chrono::microseconds(10); !broken_ && !flights_.empty() && !flights_.back()->end.done();
       pause = std::min(2 * pause, std::chrono::microseconds(1000))) {
    lock.unlock();
    std::this_thread::sleep_for(pause);
    lock.lock();
  }
}

void NcclMember::finish() {
  std::vector<std::shared_ptr<Flight>> left;
  {
    const std::lock_guard lock(mutex_);
    left.assign(flights_.begin(), flights_.end());
  }
  for (const auto& flight : left) try {
      flight->host.wait();
    } catch (...) {
      break_off(std::current_exception());
    }
  Lock lock(mutex_);
  drain(lock);
  if (broken_ || refused_) return;
  try {
    link_->begin_finalize();
    settle(lock, last_);
    link_->destroy();
    link_.reset();
  } catch (const Error&) {
    if (!broken_) stop(std::current_exception());
  }
}

void* NcclMember::allocate(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  check_broken();
  try {
    return link_->allocate(bytes);
  } catch (const Error&) {
    return nullptr;
  }
}

void NcclMember::share(void* memory, std::size_t bytes) {
  Lock lock(mutex_);
  drain(lock);  // what was given before must not find the new memory on some ranks only
  check_broken();
  link_->begin_share(memory, bytes);
  settle(lock, last_);
  link_->end_share(memory, bytes);
}

void NcclMember::unshare(void* memory) {
  Lock lock(mutex_);
  drain(lock);  // so that the device has nothing to do that waits for others, for which the lock would be held
  if (link_ && !broken_) link_->unshare(memory);
}

}  // namespace tandem::parallel
