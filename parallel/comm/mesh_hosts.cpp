#include <tandem/parallel/comm/mesh_hosts.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include <fmt/format.h>

#include <tandem/autograd/grad_mode.h>
#include <tandem/parallel/comm/clock.h>
#include <tandem/parallel/comm/combine.h>

namespace tandem::parallel {
namespace {

constexpr std::size_t kLargeBytes = 64 << 10;  // below, one exchange between all is faster

// Whether the tree over the members lo .. hi-1 is, above the hosts, that over the hosts from .. to-1. `firsts` has the
// first member of each host.
bool is_tree(const std::vector<int>& firsts, int lo, int hi, std::size_t from, std::size_t to) {
  if (to - from == 1) return true;
  const int middle = lo + (hi - lo + 1) / 2;
  const std::size_t middle_host = from + (to - from + 1) / 2;
  return firsts[middle_host] == middle && is_tree(firsts, lo, middle, from, middle_host) &&
         is_tree(firsts, middle, hi, middle_host, to);
}

std::size_t host_of(const HostPlan& plan, int member) {
  const auto found = std::find_if(plan.hosts.begin(), plan.hosts.end(), [&](const std::vector<int>& members) {
    return std::find(members.begin(), members.end(), member) != members.end();
  });
  return static_cast<std::size_t>(found - plan.hosts.begin());
}

int place_of(int member, const std::vector<int>& members) {
  return static_cast<int>(std::find(members.begin(), members.end(), member) - members.begin());
}

bool combines_values(const Collective& c) {
  return c.operation == Operation::all_reduce || c.operation == Operation::reduce;
}

}  // namespace

HostPlan plan_hosts(const std::vector<int>& hosts) {
  HostPlan plan;
  if (hosts.empty()) return plan;
  std::vector<int> numbers, firsts;
  bool contiguous = true;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    const auto found = std::find(numbers.begin(), numbers.end(), hosts[i]);
    const auto host = static_cast<std::size_t>(found - numbers.begin());
    if (found == numbers.end()) {
      numbers.push_back(hosts[i]);
      firsts.push_back(static_cast<int>(i));
      plan.hosts.emplace_back();
    }
    contiguous &= host + 1 == numbers.size();
    plan.hosts[host].push_back(static_cast<int>(i));
  }
  plan.worth_it = plan.hosts.size() > 1 && plan.hosts.size() < hosts.size();
  plan.in_tree = contiguous && is_tree(firsts, 0, static_cast<int>(hosts.size()), 0, firsts.size());
  return plan;
}

HostGroups::HostGroups(const GroupSetup& setup, Mesh& mesh, int rank)
    : setup_(setup), mesh_(mesh), rank_(rank), plan_(plan_hosts(setup.hosts)) {
  if (plan_.worth_it) members_ = plan_.hosts[host_of(plan_, rank)];
}

bool HostGroups::serves(const Collective& c) {
  if (!plan_.worth_it || state_ == State::refused) return false;
  if (!combines_values(c) && c.operation != Operation::broadcast) return false;
  const Tensor& t = c.input.defined() ? c.input : c.output;
  if (static_cast<std::size_t>(t.nbytes()) < kLargeBytes) return false;
  // 16-bit floats are combined in float32 and rounded once.
  const bool rounds = t.dtype() == DType::bfloat16 || t.dtype() == DType::float16;
  if (combines_values(c) && (!plan_.in_tree || rounds)) return false;
  if (state_ == State::not_tried) state_ = connect() ? State::connected : State::refused;
  return state_ == State::connected;
}

template <class Body>
void HostGroups::attempt(const Body& body) {
  const double start = clock_seconds();
  try {
    body();
  } catch (const CommError& e) {
    // Where no other member is named, any of them may be the one.
    std::vector<int> peers;
    for (std::size_t place = 0; place < members_.size(); ++place)
      if (members_[place] != rank_ && static_cast<int>(place) == e.rank()) peers = {members_[place]};
    if (peers.empty())
      std::copy_if(members_.begin(), members_.end(), std::back_inserter(peers), [this](int m) { return m != rank_; });
    throw ExchangeError{.peers = peers, .late = clock_seconds() - start >= setup_.timeout_seconds, .text = e.what()};
  }
}

template <class Body>
void HostGroups::inside(const Body& body) {
  if (members_.size() == 1) return;
  attempt([&] {
    Work work;
    {
      const std::lock_guard lock(mutex_);
      if (!inner_) throw CommError(-1, "the group was destroyed");
      work = body(*inner_);
    }
    work.wait();
  });
}

// Makes the group inside the host. All members tell all others whether they have one.
bool HostGroups::connect() {
  char good = 1;
  if (members_.size() > 1) {
    GroupSetup setup = setup_;
    setup.name = fmt::format("{}/host/{}", setup_.name, members_.front());
    setup.ranks.clear();
    for (const int m : members_) setup.ranks.push_back(setup_.ranks[static_cast<std::size_t>(m)]);
    setup.hosts.assign(setup.ranks.size(), setup.ranks.front());
    attempt([&] {
      try {
        auto inner = make_shm_group(setup);
        const std::lock_guard lock(mutex_);
        if (!abandoned_) inner_ = std::move(inner);
      } catch (const CommError&) {
        throw;
      } catch (const Error&) {  // the host has no memory to share
        good = 0;
      }
    });
  }
  std::vector<char> answers(setup_.ranks.size(), good);
  std::vector<Transfer> sends, receives;
  for (std::size_t r = 0; r < answers.size(); ++r) {
    if (static_cast<int>(r) == rank_) continue;
    sends.push_back({static_cast<int>(r), &good, 1});
    receives.push_back({static_cast<int>(r), &answers[r], 1});
  }
  mesh_.exchange(Team::kLane, sends, receives, setup_.timeout_seconds);
  return std::find(answers.begin(), answers.end(), 0) == answers.end();
}

void HostGroups::run(const Collective& c) {
  const NoGradGuard no_grad;
  const bool everywhere = c.operation == Operation::all_reduce, combines = combines_values(c);
  // A host's first member leads it, but the root leads its own.
  std::vector<int> leaders;
  for (const std::vector<int>& members : plan_.hosts) leaders.push_back(members.front());
  if (!everywhere) leaders[host_of(plan_, c.root)] = c.root;
  const int leader = leaders[host_of(plan_, rank_)], inner_root = place_of(leader, members_);
  Team team(mesh_, leaders, rank_, setup_.timeout_seconds);

  const Tensor whole = (c.input.defined() ? c.input : c.output).view({-1});
  // avg divides once, at the end.
  const ReduceOp op = c.op == ReduceOp::avg ? ReduceOp::sum : c.op;
  const auto piece = static_cast<std::int64_t>(Team::kPieceBytes / size_of(whole.dtype()));
  for (std::int64_t first = 0; first < whole.numel(); first += piece) {
    Tensor part = whole.narrow(0, first, std::min(piece, whole.numel() - first));
    if (c.operation == Operation::reduce && rank_ == leader && rank_ != c.root) part = part.clone();  // stays as it is
    if (combines) inside([&](ProcessGroup& inner) { return inner.reduce(part, inner_root, op); });
    if (rank_ == leader) {
      Collective between{.operation = c.operation, .op = op, .root = place_of(c.root, leaders)};
      if (combines || rank_ == c.root) between.input = part;
      if (combines || rank_ != c.root) between.output = part;
      team.run(between);
      if (combines && c.op == ReduceOp::avg && (everywhere || rank_ == c.root))
        divide(part.dtype(), part.raw_for_write().data, static_cast<int>(setup_.ranks.size()), part.numel());
    }
    if (c.operation != Operation::reduce)
      inside([&](ProcessGroup& inner) { return inner.broadcast(part, inner_root); });
  }
}

void HostGroups::abandon() {
  const std::lock_guard lock(mutex_);
  abandoned_ = true;
  try {
    const auto leaving = std::move(inner_);
    throw false;  // a group that ends while an exception passes does not wait for what is under way
  } catch (bool) {
  }
}

}  // namespace tandem::parallel
