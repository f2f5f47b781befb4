#include <tandem/parallel/comm/shm_engine.h>

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include <fmt/format.h>

#include <tandem/parallel/comm/clock.h>
#include <tandem/parallel/comm/peer_errors.h>
#include <tandem/parallel/comm/store_limits.h>
#include <tandem/tensor/threads.h>

namespace tandem::parallel {
namespace {

constexpr double kAwakeSeconds = 80e-6;  // before a rank that waits sleeps: waking it takes as long
constexpr double kCheckSeconds = 50e-3;  // between looks at the peers
// A sleeper is not woken by the bells of other groups. While it has works there, it sleeps for this long and then
// longer.
constexpr double kShortSleep = 200e-6, kLongSleep = 10e-3;
constexpr double kLauncherSeconds = 0.3;  // a launcher needs to notice how a rank ended

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

struct Inside {
  explicit Inside(Member& m) : member(m) { member.inside.store(true); }
  ~Inside() { member.inside.store(false); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  Member& member;
};

}  // namespace

bool Task::poll() {
  const std::lock_guard lock(engine_->mutex());
  return engine_->poll(*this);
}

void Task::wait() {
  engine_->wait(*this);
  if (error) std::rethrow_exception(error);
}

void Task::end(std::exception_ptr why) {
  error = std::move(why);
  try {
    if (!error) collective.finish();
  } catch (...) {
    error = std::current_exception();
  }
  collective = {};
  done = true;
}

const std::shared_ptr<RankEngines>& RankEngines::of_this_thread() {
  static thread_local const auto engines = std::make_shared<RankEngines>();
  return engines;
}
void RankEngines::progress() {
  for (Engine* e : engines) e->progress();
}
void RankEngines::check_peers() {
  for (Engine* e : engines) e->check_peers();
}

Engine::Engine(const GroupSetup& setup, std::shared_ptr<SharedMemory> memory)
    : setup_(setup),
      memory_(std::move(memory)),
      siblings_(RankEngines::of_this_thread()),
      rank_(setup.place()),
      process_(getpid()),
      messages_(setup_, *memory_) {
  own_cores_ = size() <= available_cores();
  const std::lock_guard lock(mutex());
  siblings_->engines.push_back(this);
}

void Engine::meet() {
  wait(*start({}));
  if (lost_) std::rethrow_exception(lost_);
  memory_->all_came();
}

std::shared_ptr<Task> Engine::start(const Collective& collective) {
  const std::lock_guard lock(mutex());
  std::shared_ptr<Task> task;
  if (lost_) {
    task = std::make_shared<Task>(shared_from_this(), collective, fingerprint(collective, started_));
    task->end(lost_);
    return task;
  }
  if (is_message(collective.operation)) {
    task = messages_.start(shared_from_this(), collective);
  } else {
    task = std::make_shared<Task>(shared_from_this(), collective, fingerprint(collective, started_++));
    tasks_.push_back(task);
  }
  siblings_->progress();
  return task;
}

void Engine::progress() {
  messages_.progress();
  while (!tasks_.empty()) {
    post(*tasks_.front());
    if (!advance(*tasks_.front())) break;
    stalled_since_ = 0;
  }
  if (!tasks_.empty() && stalled_since_ == 0) stalled_since_ = clock_seconds();
}

// Tells the others of the first call, if they do not know.
void Engine::post(Task& task) {
  Member& me = memory_->member(rank_);
  if (me.posted.load() > task.call.sequence) return;
  task.collective.make_dense();
  Post& mine = me.posts[task.call.sequence % 2];
  mine = {.call = task.call};
  if (gives_input(task.call, rank_)) {
    const void* data = task.collective.input.raw().data;
    const std::size_t bytes = input_bytes(task.call, size());
    mine.input = memory_->place_of(data, bytes);
    if (mine.input.area == Location::kNowhere && bytes <= kSmallBytes && size() > 1) {
      mine.input = {.area = Location::kWithPost};
      if (bytes > 0) std::memcpy(memory_->address(rank_, mine.input), data, bytes);
    }
  }
  if (static_cast<Operation>(task.call.operation) == Operation::fail) {
    const std::string& message = task.collective.message;
    me.message[message.copy(me.message, kMaxMessageBytes)] = 0;
  }
  me.posted.store(task.call.sequence + 1);
  memory_->bell().ring();
}

// Whether the first task cannot go on for want of this member.
bool Engine::lacks(int member) const {
  const Member& m = memory_->member(member);
  const bool moves = transfer_ && step_ < step_count_;
  return m.posted.load() <= tasks_.front()->call.sequence || m.steps.load() < steps_ ||
         (moves && m.state.load() != Member::kPresent);
}

// Does the next step of the first task; false when another rank has not come so far.
bool Engine::advance(Task& task) {
  for (int i = 0; i < size(); ++i)
    if (i != rank_ && lacks(i)) return false;
  if (step_ == 0) begin(task);
  if (step_ == step_count_) {
    end(task);
    return true;
  }
  if (transfer_ && !move_data()) return false;
  ++step_;
  memory_->member(rank_).steps.store(++steps_);
  memory_->bell().ring();
  return true;
}

// See note [Steps and ranks that give up].
bool Engine::move_data() {
  const Inside inside(memory_->member(rank_));
  for (int i = 0; i < size(); ++i)
    if (memory_->member(i).state.load() != Member::kPresent) return false;
  transfer_->run(step_);
  return true;
}

// All ranks have posted the call: now they see whether they mean the same. One that does not agree takes a step all
// the same, since the posts must stay until everyone has seen them.
void Engine::begin(Task& task) {
  std::vector<const Post*> posts;
  for (int i = 0; i < size(); ++i) posts.push_back(&memory_->member(i).posts[task.call.sequence % 2]);
  task.error = disagreement(task, posts);
  const auto operation = static_cast<Operation>(task.call.operation);
  if (task.error || operation == Operation::barrier || operation == Operation::fail || task.call.on_gpu != 0) return;
  transfer_.emplace(*memory_, task.collective, posts, rank_);
  step_count_ = transfer_->steps();
}

void Engine::end(Task& task) {
  if (transfer_) transfer_->finish();
  transfer_.reset();
  step_ = 0;
  step_count_ = 1;
  task.end(task.error);
  tasks_.pop_front();
}

std::exception_ptr Engine::disagreement(const Task& task, const std::vector<const Post*>& posts) const {
  constexpr auto kFail = static_cast<std::int32_t>(Operation::fail);
  if (task.call.operation == kFail) return nullptr;
  for (int i = 0; i < size(); ++i)
    if (posts[static_cast<std::size_t>(i)]->call.operation == kFail)
      return std::make_exception_ptr(cannot_take_part({setup_, task.call}, i, memory_->member(i).message));
  for (int i = 0; i < size(); ++i) {
    const Fingerprint& other = posts[static_cast<std::size_t>(i)]->call;
    if (other != task.call) return std::make_exception_ptr(ranks_disagree({setup_, task.call}, i, other));
  }
  return nullptr;
}

bool Engine::poll(Task& task) {
  siblings_->progress();
  if (task.done || clock_seconds() - checked_ <= kCheckSeconds) return task.done;
  if (const Messages::Lane* lane = messages_.lane_of(task)) check_peer_of(*lane);  // an error names this call first
  siblings_->check_peers();
  return task.done;
}

// Stays awake for a while. It lets others have the core only where there are more ranks than cores, so that it is a
// rank that gets it: another program would keep it for milliseconds.
void Engine::wait(Task& task) {
  const double awake = own_cores_ ? kAwakeSeconds : kAwakeSeconds / 4;
  for (double sleep = kShortSleep;; sleep = std::min(2 * sleep, kLongSleep)) {
    const double start = clock_seconds();
    for (int i = 0;; ++i) {
      {
        const std::lock_guard lock(mutex());
        siblings_->progress();
        if (task.done) return;
      }
      if ((i % 16 == 0 || !own_cores_) && clock_seconds() - start >= awake) break;
      if (own_cores_)
        pause();
      else
        sched_yield();
    }
    bool done = false;
    memory_->bell().sleep(others_pending() ? sleep : kCheckSeconds, [&] {
      const std::lock_guard lock(mutex());
      done = poll(task);
      return done;
    });
    if (done) return;
  }
}

bool Engine::others_pending() const {
  const std::lock_guard lock(mutex());
  return std::any_of(siblings_->engines.begin(), siblings_->engines.end(),
                     [this](const Engine* e) { return e != this && e->pending(); });
}

void Engine::check_peers() {
  checked_ = clock_seconds();
  if (!tasks_.empty()) check_peers_of(tasks_.front()->call, stalled_since_, [this](int i) { return lacks(i); });
  for (const Messages::Lane& lane : messages_.lanes()) check_peer_of(lane);
}

void Engine::check_peer_of(const Messages::Lane& lane) {
  if (!lane.tasks.empty())
    check_peers_of(lane.tasks.front()->call, lane.stalled_since,
                   [&](int i) { return i == lane.peer && messages_.lacks_peer(lane); });
}

// Gives up when a rank that a call waits for has ended, has left, has given up, or is silent for too long.
void Engine::check_peers_of(const Fingerprint& call, double stalled_since, FunctionRef<bool(int)> lacks_member) {
  std::vector<int> missing;
  for (int i = 0; i < size(); ++i)
    if (i != rank_ && lacks_member(i)) missing.push_back(i);
  if (missing.empty()) return;
  const std::string where = fmt::format("while this rank waited in {}", describe(call));
  for (const int i : missing) {
    const std::int32_t state = memory_->member(i).state.load();
    const bool dead = memory_->ended(i);
    if ((state == Member::kPresent && !dead) || !lacks_member(i)) continue;  // it did its share before it left
    if (state < Member::kGaveUp)
      return lose(i, fmt::format("{} {} {}", setup_.rank_name(i), how_ended(i, dead), where));
    const int because = state - Member::kGaveUp;
    const std::string name = setup_.rank_name(because);
    // Why that one is lost is what counts, not who was the first to see it.
    const std::int32_t its_state = memory_->member(because).state.load();
    const bool its_end = memory_->ended(because), gone = its_end || its_state == Member::kLeft;
    if (because == rank_ || !gone)
      return lose(because, fmt::format("{} has given up on {} {}", setup_.rank_name(i), name, where));
    return lose(because, fmt::format("{} {} {}", name, how_ended(because, its_end), where));
  }
  if (clock_seconds() - stalled_since < setup_.timeout_seconds) return;
  std::string seen;
  for (const int i : missing)
    seen += fmt::format("{}{} ({})", seen.empty() ? "" : " and ", setup_.rank_name(i), last_seen(i, call));
  lose(missing.front(), waited_in_vain(call, setup_.timeout_seconds, seen));
}

// What a rank does instead of its share of a call.
std::string Engine::last_seen(int member, const Fingerprint& call) const {
  const Member& m = memory_->member(member);
  const std::uint64_t posted = m.posted.load();
  const Fingerprint& last = m.posts[(posted + 1) % 2].call;
  std::string same;
  if (is_message(static_cast<Operation>(call.operation)))
    same = messages_.other_end(call);
  else if (posted > call.sequence)
    same = describe(last);
  if (!same.empty()) return fmt::format("it has started {}, but has not waited for it or asked for it since", same);
  if (const std::string other = messages_.awaited_by(member); !other.empty())
    return fmt::format("it has started {}, which this rank has not", other);
  if (posted == 0) return "not seen yet";
  return posted == 1 ? "last seen making the group" : "last seen in " + describe(last);
}

std::string Engine::how_ended(int member, bool process_ended) const {
  const std::string key = ended_key(setup_.ranks[static_cast<std::size_t>(member)]);
  const double start = clock_seconds();
  try {
    do {
      if (setup_.store->check(key)) return setup_.store->get(key);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    } while (process_ended && clock_seconds() - start < kLauncherSeconds);
  } catch (const Error&) {  // the store has gone too
  }
  return process_ended ? "has ended" : "has left the group";
}

// No call of the group can succeed any more; the others learn it too.
void Engine::lose(int member, const std::string& what) { stop(member, what, Member::kGaveUp + member); }

void Engine::stop(int member, const std::string& what, std::int32_t state) {
  lost_ = std::make_exception_ptr(CommError(member, who(rank_, size()) + what));
  memory_->member(rank_).state.store(state);
  memory_->bell().ring();
  memory_->wait_until_others_outside();
  for (const auto& task : tasks_) task->end(lost_);
  tasks_.clear();
  messages_.end(lost_);
}

void Engine::leave() {
  std::unique_lock lock(mutex());
  while (!ends_at_once() && pending() && getpid() == process_) {
    const std::shared_ptr<Task> task = tasks_.empty() ? messages_.first() : tasks_.front();
    lock.unlock();
    wait(*task);
    lock.lock();
  }
  lock.unlock();
  abandon("was destroyed");
}

void Engine::abandon(const std::string& why) {
  const std::lock_guard lock(mutex());
  if (left_) return;
  left_ = true;
  if (!lost_ && getpid() == process_) stop(rank_, fmt::format("the group {}", why), Member::kLeft);
  std::erase(siblings_->engines, this);
}

void work_for_groups_of_this_thread() {
  const auto& engines = RankEngines::of_this_thread();
  const std::lock_guard lock(engines->mutex);
  engines->progress();
}

void abandon_groups_of_this_thread() {
  const auto siblings = RankEngines::of_this_thread();
  while (!siblings->engines.empty()) siblings->engines.back()->abandon("has ended with its rank");
}

}  // namespace tandem::parallel
