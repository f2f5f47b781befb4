// The process group over a mesh: what its members call is compared, and then run in order on the group's own threads:
// one for the collectives, and one for the messages to or from each peer.
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>

#include <fmt/format.h>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/comm/mesh.h>
#include <tandem/parallel/comm/mesh_hosts.h>
#include <tandem/parallel/comm/mesh_queue.h>
#include <tandem/parallel/comm/mesh_reason.h>
#include <tandem/parallel/comm/mesh_team.h>
#include <tandem/parallel/comm/peer_errors.h>
#include <tandem/parallel/comm/store_limits.h>

namespace tandem::parallel {
namespace {

// What each rank tells every other before data moves.
struct Header {
  Fingerprint fingerprint;
  std::uint64_t message_bytes = 0;  // of fail
};

bool is_message(const Collective& c) { return c.operation == Operation::send || c.operation == Operation::recv; }

// What this process does in the group, as a member.
class Membership {
 public:
  Membership(const GroupSetup& setup, int rank, std::unique_ptr<Mesh> mesh);
  // What is queued is finished first, or fails after the timeout, unless it ends at once.
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;
  Work start(const Collective& c);
  int rank() const { return rank_; }

 private:
  int size() const { return static_cast<int>(setup_.ranks.size()); }
  Caller caller(const Fingerprint& call) const { return {setup_, call}; }
  // Runs one call on the thread of its queue; `sequence` is the number of those before it.
  void run(Collective& c, std::uint64_t& sequence);
  void agree(const Collective& c, std::uint64_t sequence);
  void move_message(const Collective& c, std::uint64_t sequence);
  void check_whole();
  std::exception_ptr break_off(const ExchangeError& error, const Fingerprint& call);

  const GroupSetup setup_;
  const int rank_;
  const std::unique_ptr<Mesh> mesh_;
  Team all_;
  HostGroups hosts_;
  std::mutex broken_mutex_;
  std::condition_variable broken_changed_;
  std::exception_ptr broken_;  // what the first loss threw, and every later call throws
  bool abandoned_ = false;

  std::mutex queues_mutex_;
  std::map<std::pair<int, Operation>, std::unique_ptr<CallQueue>> messages_;  // by peer and direction
  std::unique_ptr<CallQueue> collectives_;
};

std::vector<int> numbers_below(int n) {
  std::vector<int> result(static_cast<std::size_t>(n));
  std::iota(result.begin(), result.end(), 0);
  return result;
}

Membership::Membership(const GroupSetup& setup, int rank, std::unique_ptr<Mesh> mesh)
    : setup_(setup),
      rank_(rank),
      mesh_(std::move(mesh)),
      all_(*mesh_, numbers_below(size()), rank, setup.timeout_seconds),
      hosts_(setup_, *mesh_, rank) {
  collectives_ =
      std::make_unique<CallQueue>([this, sequence = std::uint64_t{0}](Collective& c) mutable { run(c, sequence); });
}

Membership::~Membership() {
  if (ends_at_once()) {
    {
      const std::lock_guard lock(broken_mutex_);
      abandoned_ = true;
    }
    mesh_->abandon();
    hosts_.abandon();
  }
  messages_.clear();
  collectives_.reset();
}

Work Membership::start(const Collective& c) {
  if (!is_message(c)) return collectives_->push(c);
  const std::lock_guard lock(queues_mutex_);
  std::unique_ptr<CallQueue>& queue = messages_[{c.root, c.operation}];
  if (!queue)
    queue = std::make_unique<CallQueue>(
        [this, sequence = std::uint64_t{0}](Collective& message) mutable { run(message, sequence); });
  return queue->push(c);
}

void Membership::check_whole() {
  const std::lock_guard lock(broken_mutex_);
  if (broken_) std::rethrow_exception(broken_);
}

void Membership::run(Collective& c, std::uint64_t& sequence) {
  check_whole();
  ++sequence;
  try {
    c.make_dense();
    if (is_message(c)) {
      move_message(c, sequence);
    } else {
      agree(c, sequence);
      if (c.announced) return;
      if (hosts_.serves(c))
        hosts_.run(c);
      else
        all_.run(c);
    }
  } catch (const ExchangeError& e) {
    std::rethrow_exception(break_off(e, fingerprint(c, sequence)));
  }
  c.finish();
}

// The first failure is explained, and then ends all connections. Other calls that fail meanwhile wait for it.
std::exception_ptr Membership::break_off(const ExchangeError& error, const Fingerprint& call) {
  std::unique_lock lock(broken_mutex_);
  if (error.echo) broken_changed_.wait(lock, [this] { return broken_ != nullptr; });
  if (broken_) return broken_;
  if (abandoned_)
    broken_ = std::make_exception_ptr(
        CommError(rank_, fmt::format("{}the group was destroyed in {}", who(rank_, size()), describe(call))));
  else
    broken_ = std::make_exception_ptr(explain(setup_, rank_, error, call));
  broken_changed_.notify_all();
  hosts_.abandon();
  mesh_->close();
  return broken_;
}

// All members say what they are about to do; a difference is an error on each of them, before data moves.
void Membership::agree(const Collective& c, std::uint64_t sequence) {
  std::string message = c.message.substr(0, kMaxMessageBytes);
  Header mine{fingerprint(c, sequence), message.size()};
  std::vector<Header> all(static_cast<std::size_t>(size()));
  std::vector<Transfer> sends, receives;
  for (int r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    sends.push_back({r, &mine, sizeof mine});
    receives.push_back({r, &all[static_cast<std::size_t>(r)], sizeof mine});
  }
  all[static_cast<std::size_t>(rank_)] = mine;
  all_.exchange(sends, receives);

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
    all_.exchange(sends, receives);
    if (c.operation == Operation::fail) return;
    throw cannot_take_part(caller(mine.fingerprint), first, messages[static_cast<std::size_t>(first)]);
  }
  for (int r = 0; r < size(); ++r) {
    const Fingerprint& other = all[static_cast<std::size_t>(r)].fingerprint;
    if (other != mine.fingerprint) throw ranks_disagree(caller(mine.fingerprint), r, other);
  }
}

// Each direction between two members has a lane of its own. Both say what they expect; if they agree, data move.
void Membership::move_message(const Collective& c, std::uint64_t sequence) {
  const bool sends = c.operation == Operation::send;
  const int peer = c.root, from = sends ? rank_ : peer, to = sends ? peer : rank_;
  const int lane = Team::kLane + 1 + from * size() + to;
  Fingerprint mine = fingerprint(c, sequence), theirs;
  mesh_->exchange(lane, {{peer, &mine, sizeof mine}}, {{peer, &theirs, sizeof theirs}}, setup_.timeout_seconds);
  Fingerprint expected = mine;
  expected.operation = static_cast<std::int32_t>(sends ? Operation::recv : Operation::send);
  expected.root = rank_;
  if (theirs != expected) throw messages_differ(caller(mine), peer, theirs);
  const Tensor& t = sends ? c.input : c.output;
  const std::vector<Transfer> data{
      {peer, const_cast<void*>(static_cast<const void*>(t.raw().data)), static_cast<std::size_t>(t.nbytes())}};
  exchange_in_pieces(*mesh_, lane, sends ? data : std::vector<Transfer>(), sends ? std::vector<Transfer>() : data,
                     setup_.timeout_seconds);
}

class MeshGroup final : public ProcessGroup {
 public:
  MeshGroup(const GroupSetup& setup, std::string backend, FunctionRef<MeshMaker> make_mesh)
      : backend_(std::move(backend)), size_(static_cast<int>(setup.ranks.size())) {
    const int rank = setup.place();
    if (rank < 0) return;
    member_ = std::make_unique<Membership>(setup, rank, make_mesh(setup, rank));
  }
  // A child that ends has none of the threads, and shares the sockets: all is left as it is.
  ~MeshGroup() override {
    if (getpid() != process_) (void)member_.release();
  }
  std::string backend() const override { return backend_; }
  int rank() const override { return member_ ? member_->rank() : -1; }
  int size() const override { return size_; }

 protected:
  Work start(const Collective& c) override {
    check(getpid() == process_, name(c.operation),
          "this process was forked from process {}, which is the member of the group; it can take no part", process_);
    return member_->start(c);
  }

 private:
  const std::string backend_;
  const int size_;
  const pid_t process_ = getpid();
  std::unique_ptr<Membership> member_;  // null in processes that are no members
};

}  // namespace

std::shared_ptr<ProcessGroup> make_mesh_group(const GroupSetup& setup, const std::string& backend,
                                              FunctionRef<MeshMaker> make_mesh) {
  return std::make_shared<MeshGroup>(setup, backend, make_mesh);
}

}  // namespace tandem::parallel
