// The process group over a mesh, a transport alone: values are combined here, in the tree of `combine`, so that bits
// are those of every other backend. A thread of the group's own runs the collectives in order.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include <fmt/format.h>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/comm/combine.h>
#include <tandem/parallel/comm/mesh.h>
#include <tandem/parallel/comm/peer_errors.h>
#include <tandem/parallel/comm/store_limits.h>
#include <tandem/tensor/threads.h>

namespace tandem::parallel {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPieceBytes = 8 << 20;   // of a tensor that are combined at a time
constexpr std::size_t kDirectBytes = 8 << 10;  // up to this size every rank combines everything: one exchange less
// How long to look for the reason of a broken connection: a launcher needs a moment to see how a process ended.
constexpr auto kReasonTime = std::chrono::milliseconds(1200);
// How long ranks that waited in vain have to say so, and thus that they are not the one that is missing.
constexpr auto kLateTime = std::chrono::milliseconds(400);

// What each rank tells every other before data moves.
struct Header {
  Fingerprint fingerprint;
  std::uint64_t message_bytes = 0;  // of fail
};

// Elements of a tensor.
struct Range {
  std::int64_t first = 0, count = 0;
};

class Task final : public Work::State {
 public:
  explicit Task(const Collective& c) : collective(c) {}
  // Makes the tensors ready; not before the collectives before it have ended.
  void begin() {
    collective.make_dense();
    const Tensor &from = collective.input, &to = collective.output;
    if (from.defined()) in = static_cast<char*>(const_cast<void*>(static_cast<const void*>(from.raw().data)));
    if (to.defined()) out = static_cast<char*>(const_cast<void*>(static_cast<const void*>(to.raw().data)));
  }
  bool poll() override {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  void wait() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    if (error_) std::rethrow_exception(error_);
  }
  void finish(std::exception_ptr error) {
    collective = {};
    const std::lock_guard lock(mutex_);
    done_ = true;
    error_ = std::move(error);
    changed_.notify_all();
  }

  Collective collective;
  char *in = nullptr, *out = nullptr;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

class MeshGroup final : public ProcessGroup {
 public:
  MeshGroup(const GroupSetup& setup, std::string backend, FunctionRef<MeshMaker> make_mesh)
      : setup_(setup), backend_(std::move(backend)) {
    const auto found = std::find(setup.ranks.begin(), setup.ranks.end(), setup.world_rank);
    if (found == setup.ranks.end()) return;
    rank_ = static_cast<int>(found - setup.ranks.begin());
    mesh_ = make_mesh(setup, rank_);
    thread_ = std::thread([this] { run_all(); });
  }
  ~MeshGroup() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      abandoned_ = std::uncaught_exceptions() > 0;  // what unwinds does not wait for peers
      if (abandoned_ && mesh_) mesh_->abandon();
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();  // what is queued is finished first, or fails after the timeout
  }
  std::string backend() const override { return backend_; }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(setup_.ranks.size()); }

 protected:
  Work start(const Collective& c) override;

 private:
  Caller caller(const Fingerprint& call) const { return {rank_, size(), call}; }
  std::string me() const { return who(rank_, size()); }
  std::string key(const char* what) const { return fmt::format("{}/{}", setup_.name, what); }
  bool is_abandoned() {
    const std::lock_guard lock(mutex_);
    return abandoned_;
  }
  void run_all();
  void run(Task& task);
  void agree(const Collective& c);
  void reduce_all(Task& task, std::int64_t count);
  void reduce_parts(Task& task, std::int64_t count);
  void combine_mine(const Task& task, const std::vector<Range>& ranges, char* result);
  // The time begins anew with each exchange: it is for ranks that are silent, not for data that move.
  void exchange(const std::vector<Transfer>& sends, const std::vector<Transfer>& receives) {
    mesh_->exchange(0, sends, receives, setup_.timeout_seconds);
  }
  void exchange_in_pieces(std::vector<Transfer> sends, std::vector<Transfer> receives);
  CommError explain(const ExchangeError& error, const Fingerprint& call);
  std::string find_reason(const ExchangeError& error);

  const GroupSetup setup_;
  const std::string backend_;
  int rank_ = -1;
  std::unique_ptr<Mesh> mesh_;
  // For the group's thread alone:
  std::uint64_t sequence_ = 0;
  std::vector<char> scratch_;
  std::exception_ptr broken_;  // what the first loss threw, and every later collective throws

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Task>> queue_;
  bool stopping_ = false, abandoned_ = false;
  std::thread thread_;
};

Work MeshGroup::start(const Collective& c) {
  auto task = std::make_shared<Task>(c);
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(task);
  }
  changed_.notify_one();
  return Work(std::move(task));
}

void MeshGroup::run_all() {
  const SingleThreadScope one_thread;
  const NoBrokenPipeSignal no_signal;
  for (;;) {
    std::shared_ptr<Task> task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    std::exception_ptr error = broken_;
    if (!error) {
      try {
        task->begin();
        run(*task);
        task->collective.finish();
      } catch (const ExchangeError& e) {
        const Fingerprint call = fingerprint(task->collective, sequence_);
        error = broken_ = std::make_exception_ptr(
            is_abandoned() ? CommError(rank_, fmt::format("{}the group was destroyed in {}", me(), describe(call)))
                           : explain(e, call));
        mesh_->close();
      } catch (...) {
        error = std::current_exception();
      }
    }
    task->finish(std::move(error));
  }
}

// All members say what they are about to do; a difference is an error on each of them, before data moves.
void MeshGroup::agree(const Collective& c) {
  std::string message = c.message.substr(0, kMaxMessageBytes);
  Header mine{fingerprint(c, ++sequence_), message.size()};
  std::vector<Header> all(static_cast<std::size_t>(size()));
  std::vector<Transfer> sends, receives;
  for (int r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    sends.push_back({r, &mine, sizeof mine});
    receives.push_back({r, &all[static_cast<std::size_t>(r)], sizeof mine});
  }
  all[static_cast<std::size_t>(rank_)] = mine;
  exchange(sends, receives);

  constexpr auto kFail = static_cast<std::int32_t>(Operation::fail);
  const auto fails = [](const Header& h) { return h.fingerprint.operation == kFail; };
  if (std::any_of(all.begin(), all.end(), fails)) {
    std::vector<std::string> messages(all.size());
    sends.clear();
    receives.clear();
    int first = -1;
    for (int r = size() - 1; r >= 0; --r) {
      if (!fails(all[static_cast<std::size_t>(r)])) continue;
      first = r;
      if (r == rank_) continue;
      std::string& text = messages[static_cast<std::size_t>(r)];
      text.resize(std::min<std::size_t>(all[static_cast<std::size_t>(r)].message_bytes, kMaxMessageBytes));
      receives.push_back({r, text.data(), text.size()});
    }
    if (c.operation == Operation::fail)
      for (int r = 0; r < size(); ++r)
        if (r != rank_) sends.push_back({r, message.data(), message.size()});
    exchange(sends, receives);
    if (c.operation == Operation::fail) return;
    throw cannot_take_part(caller(mine.fingerprint), first, messages[static_cast<std::size_t>(first)]);
  }
  for (int r = 0; r < size(); ++r) {
    const Fingerprint& other = all[static_cast<std::size_t>(r)].fingerprint;
    if (other != mine.fingerprint) throw ranks_disagree(caller(mine.fingerprint), r, other);
  }
}

void MeshGroup::run(Task& task) {
  const Collective& c = task.collective;
  agree(c);
  const std::int64_t count = fingerprint(c, 0).count;
  const Tensor& any = c.input.defined() ? c.input : c.output;
  const std::size_t bytes = any.defined() ? static_cast<std::size_t>(count) * size_of(any.dtype()) : 0;
  if (bytes == 0) return;
  const auto part = [&](char* whole, int r) { return whole + static_cast<std::size_t>(r) * bytes; };
  std::vector<Transfer> sends, receives;
  // To or from each other rank.
  const auto to_all = [&](const auto& data) {
    for (int r = 0; r < size(); ++r)
      if (r != rank_) sends.push_back({r, data(r), bytes});
  };
  const auto from_all = [&](const auto& data) {
    for (int r = 0; r < size(); ++r)
      if (r != rank_) receives.push_back({r, data(r), bytes});
  };
  const bool is_root = rank_ == c.root;
  switch (c.operation) {
    case Operation::all_reduce:
    case Operation::reduce:
      return reduce_all(task, count);
    case Operation::reduce_scatter:
      return reduce_parts(task, count);
    case Operation::broadcast:
      if (is_root)
        to_all([&](int) { return task.in; });
      else
        receives.push_back({c.root, task.out, bytes});
      break;
    case Operation::all_gather:
      std::memmove(part(task.out, rank_), task.in, bytes);
      to_all([&](int) { return part(task.out, rank_); });
      from_all([&](int r) { return part(task.out, r); });
      break;
    case Operation::gather:
      if (is_root) {
        std::memmove(part(task.out, rank_), task.in, bytes);
        from_all([&](int r) { return part(task.out, r); });
      } else {
        sends.push_back({c.root, task.in, bytes});
      }
      break;
    case Operation::scatter:
      if (is_root) {
        to_all([&](int r) { return part(task.in, r); });
      } else {
        receives.push_back({c.root, task.out, bytes});
      }
      break;
    case Operation::barrier:
    case Operation::fail:
      return;
  }
  exchange_in_pieces(std::move(sends), std::move(receives));
  if (c.operation == Operation::scatter && is_root) std::memmove(task.out, part(task.in, rank_), bytes);
}

// Cuts the transfers, which are of one size each way, into pieces.
void MeshGroup::exchange_in_pieces(std::vector<Transfer> sends, std::vector<Transfer> receives) {
  const auto take_piece = [](std::vector<Transfer>& whole) {
    std::vector<Transfer> pieces;
    for (Transfer& t : whole) {
      pieces.push_back({t.peer, t.data, std::min(t.bytes, kPieceBytes)});
      t.data = static_cast<char*>(t.data) + pieces.back().bytes;
      t.bytes -= pieces.back().bytes;
    }
    std::erase_if(whole, [](const Transfer& t) { return t.bytes == 0; });
    return pieces;
  };
  while (!sends.empty() || !receives.empty()) {
    const std::vector<Transfer> these = take_piece(sends), those = take_piece(receives);
    exchange(these, those);
  }
}

// Sends the elements ranges[r] of the input to each other rank r, and combines all ranks' elements ranges[rank()].
void MeshGroup::combine_mine(const Task& task, const std::vector<Range>& ranges, char* result) {
  const DType dtype = task.collective.input.dtype();
  const std::size_t width = size_of(dtype);
  const Range mine = ranges[static_cast<std::size_t>(rank_)];
  const std::size_t bytes = static_cast<std::size_t>(mine.count) * width;
  scratch_.resize(std::max(scratch_.size(), bytes * static_cast<std::size_t>(size() - 1)));
  std::vector<Transfer> sends, receives;
  std::vector<const void*> parts;
  char* next = scratch_.data();
  for (int r = 0; r < size(); ++r) {
    const Range theirs = ranges[static_cast<std::size_t>(r)];
    char* data = task.in + static_cast<std::size_t>(theirs.first) * width;
    if (r == rank_) {
      parts.push_back(data);
      continue;
    }
    sends.push_back({r, data, static_cast<std::size_t>(theirs.count) * width});
    receives.push_back({r, next, bytes});
    parts.push_back(next);
    next += bytes;
  }
  exchange(sends, receives);
  if (result != nullptr) combine(dtype, task.collective.op, parts, std::vector<void*>{result}, mine.count);
}

// all_reduce, and reduce, which leaves all tensors but the root's as they are.
void MeshGroup::reduce_all(Task& task, std::int64_t count) {
  const Collective& c = task.collective;
  const std::size_t width = size_of(c.input.dtype());
  const auto at = [&](std::int64_t i) { return task.in + static_cast<std::size_t>(i) * width; };
  const bool everywhere = c.operation == Operation::all_reduce;
  if (static_cast<std::size_t>(count) * width <= kDirectBytes && everywhere)
    return combine_mine(task, std::vector<Range>(static_cast<std::size_t>(size()), {0, count}), task.out);
  const auto piece = static_cast<std::int64_t>(kPieceBytes / width);
  std::vector<char> aside;  // the result, where it must not go into the tensor
  for (std::int64_t first = 0; first < count; first += piece) {
    const std::int64_t n = std::min(piece, count - first);
    std::vector<Range> ranges;
    for (int r = 0; r < size(); ++r) {
      const std::int64_t begin = n * r / size(), end = n * (r + 1) / size();
      ranges.push_back({first + begin, end - begin});
    }
    const auto bytes = [&](int r) {
      return static_cast<std::size_t>(ranges[static_cast<std::size_t>(r)].count) * width;
    };
    const auto chunk = [&](int r) { return at(ranges[static_cast<std::size_t>(r)].first); };
    char* result = chunk(rank_);
    if (!everywhere && rank_ != c.root) {
      aside.resize(bytes(rank_));
      result = aside.data();
    }
    combine_mine(task, ranges, result);
    std::vector<Transfer> sends, receives;
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      if (everywhere || r == c.root) sends.push_back({r, result, bytes(rank_)});
      if (everywhere || rank_ == c.root) receives.push_back({r, chunk(r), bytes(r)});
    }
    exchange(sends, receives);
  }
}

void MeshGroup::reduce_parts(Task& task, std::int64_t count) {
  const std::size_t width = size_of(task.collective.input.dtype());
  const std::int64_t piece = std::max<std::int64_t>(1, static_cast<std::int64_t>(kPieceBytes / width) / size());
  for (std::int64_t first = 0; first < count; first += piece) {
    const std::int64_t n = std::min(piece, count - first);
    std::vector<Range> ranges;
    for (int r = 0; r < size(); ++r) ranges.push_back({count * r + first, n});
    combine_mine(task, ranges, task.out + static_cast<std::size_t>(first) * width);
  }
}

// Finds out, and tells the other ranks, which rank is to blame: "<ranks>|<how it ended>", without the latter where it
// is silent. The first reason that any rank has found holds for all.
std::string MeshGroup::find_reason(const ExchangeError& error) {
  Store& store = *setup_.store;
  const std::string lost = key("lost");
  if (error.late) {
    const auto late = [&](int r) { return fmt::format("{}/{}", key("late"), r); };
    store.set(late(rank_), "1");
    std::this_thread::sleep_for(kLateTime);
    std::vector<int> silent;
    for (const int r : error.peers)
      if (!store.check(late(r))) silent.push_back(r);
    return store.compare_set(lost, "", fmt::format("{}|", fmt::join(silent.empty() ? error.peers : silent, " and ")));
  }
  std::vector<int> others = error.peers;
  for (int r = 0; r < size(); ++r)
    if (r != rank_ && std::find(others.begin(), others.end(), r) == others.end()) others.push_back(r);
  for (const auto end = Clock::now() + kReasonTime; Clock::now() < end;) {
    if (store.check(lost)) return store.get(lost);
    for (const int r : others) {
      const std::string ended = ended_key(setup_.ranks[static_cast<std::size_t>(r)]);
      if (store.check(ended)) return store.compare_set(lost, "", fmt::format("{}|{}", r, store.get(ended)));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return store.compare_set(lost, "", fmt::format("{}|has closed its connection ({})", error.peers.front(), error.text));
}

// An error's text without its "rank 1 of 4: ".
std::string without_prefix(const std::string& text) {
  const std::size_t colon = text.find(": ");
  return text.starts_with("rank ") && colon != std::string::npos ? text.substr(colon + 2) : text;
}

CommError MeshGroup::explain(const ExchangeError& error, const Fingerprint& call) {
  const std::string what = describe(call);
  std::string reason, note;
  try {
    reason = find_reason(error);
  } catch (const CommError& e) {  // the store is lost, or silent
    note = "; " + without_prefix(e.what());
    const auto found = std::find(setup_.ranks.begin(), setup_.ranks.end(), e.rank());
    const auto holder = static_cast<int>(found - setup_.ranks.begin());
    // A holder that had come, and has left because another rank has not, is not to blame.
    const bool missed = std::find(error.peers.begin(), error.peers.end(), holder) != error.peers.end();
    if (e.rank() >= 0 && holder < size() && (missed || !error.late))
      reason = fmt::format("{}|has ended", holder);
    else if (error.late)
      reason = fmt::format("{}|", fmt::join(error.peers, " and "));
    else
      reason = fmt::format("{}|has closed its connection ({})", error.peers.front(), error.text);
  } catch (const std::exception& e) {
    reason = fmt::format("{}|cannot be reached ({})", error.peers.front(), error.text);
    note = std::string("; ") + e.what();
  }
  const std::size_t bar = std::min(reason.find('|'), reason.size());
  const std::string ranks = reason.substr(0, bar), how = reason.substr(std::min(bar + 1, reason.size()));
  int first = error.peers.front();
  std::from_chars(ranks.data(), ranks.data() + ranks.size(), first);
  if (!how.empty() && first == rank_)
    return CommError(
        first, fmt::format("{}lost its connections in {}: the other ranks have found that it {}", me(), what, how));
  if (!how.empty())
    return CommError(first, fmt::format("{}rank {} {} while this rank waited in {}{}", me(), ranks, how, what, note));
  if (first == rank_)
    return CommError(first, fmt::format("{}came to {} after the other ranks had given up waiting for it; a longer wait "
                                        "is set by InitOptions::timeout_seconds",
                                        me(), what));
  return CommError(first, me() + waited_in_vain(call, setup_.timeout_seconds, "rank " + ranks) + note);
}

}  // namespace

std::shared_ptr<ProcessGroup> make_mesh_group(const GroupSetup& setup, const std::string& backend,
                                              FunctionRef<MeshMaker> make_mesh) {
  return std::make_shared<MeshGroup>(setup, backend, make_mesh);
}

}  // namespace tandem::parallel
