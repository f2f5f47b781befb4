// MPI as a Mesh, the only thing in the module libtandem_mpi.so.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include <fmt/format.h>

#include <tandem/parallel/comm/clock.h>
#include <tandem/parallel/comm/mesh_keys.h>
#include <tandem/parallel/comm/mpi_module.h>
#include <tandem/parallel/comm/mpi_runtime.h>

namespace tandem::parallel {
namespace {

using Clock = std::chrono::steady_clock;

// Messages of all groups travel in one communicator, since making one waits for its members without a deadline. So a
// tag says which group and which lane. A group has lanes for its collectives, and one from each member to each.
int lanes_of(const GroupSetup& setup) {
  constexpr int kForCollectives = 16;
  const auto size = static_cast<int>(setup.ranks.size());
  return kForCollectives + size * size;
}
constexpr std::size_t kPieceBytes = 64 << 20;  // of one message: MPI counts in int
constexpr auto kSpinTime = std::chrono::microseconds(200), kNap = std::chrono::microseconds(50);
constexpr double kAskSeconds = 0.5;                         // at most, for what is asked there
constexpr auto kLookTime = std::chrono::milliseconds(150);  // between looks into the store
// What a rank that has ended had sent before is here after this time.
constexpr auto kTimeAfterEnd = std::chrono::milliseconds(500);

// Of the group's tags, which no other group has: the first member takes them.
std::int64_t first_tag_of(const GroupSetup& setup, int rank) {
  const std::string key = setup.name + "/mpi/first_tag";
  const int lanes = lanes_of(setup);
  if (rank == 0) setup.store->set(key, std::to_string(setup.store->add("mpi/tags", lanes) - lanes));
  const std::int64_t first = std::atoll(setup.store->get(key).c_str());
  done_with_keys(setup, {key});
  return first;
}

class MpiMesh final : public Mesh {
 public:
  MpiMesh(const GroupSetup& setup, int rank)
      : setup_(setup), ranks_(setup_.ranks), lanes_(lanes_of(setup)), mpi_(MpiRuntime::get()) {
    mpi_.start(setup, rank);
    const std::int64_t first = first_tag_of(setup, rank);
    const std::lock_guard lock(mpi_.mutex);
    check(first + lanes_ - 1 <= mpi_.largest_tag, "new_group",
          "too many groups have been made: this MPI has {} tags, and a group of {} ranks needs {}", mpi_.largest_tag,
          ranks_.size(), lanes_);
    first_tag_ = static_cast<int>(first);
    ++mpi_.meshes;
  }
  ~MpiMesh() override {
    const std::lock_guard lock(mpi_.mutex);
    --mpi_.meshes;
  }
  MpiMesh(const MpiMesh&) = delete;
  MpiMesh& operator=(const MpiMesh&) = delete;
  void exchange(int lane, const std::vector<Transfer>& sends, const std::vector<Transfer>& receives,
                double seconds) override;
  void abandon() override { abandoned_ = true; }
  // MPI has no connections that could end: the others find in the store that the group is lost.
  void close() override { abandoned_ = true; }

 private:
  // The requests of an exchange, a piece of a transfer each, and whose they are.
  struct Requests {
    std::vector<MPI_Request> all = {};
    std::vector<int> peers = {};
    std::size_t receives = 0;  // which come first
    std::size_t open = 0;
    // Of the last look:
    std::vector<int> ended = {};
    std::vector<MPI_Status> statuses = {};
  };
  // How many requests have ended since the last look.
  int look(Requests& requests);
  void post(const Transfer& transfer, bool is_send, int tag, Requests& requests);
  [[noreturn]] void give_up(Requests& requests, bool late, std::string text, int peer_to_blame = -1);
  bool should_give_up(const Requests& requests, double seconds) const;
  ExchangeError refusal(const std::vector<Transfer>& transfers) const;

  const GroupSetup setup_;
  const std::vector<int>& ranks_;  // in the job
  const int lanes_;
  MpiRuntime& mpi_;
  int first_tag_ = 0;
  std::atomic<bool> abandoned_ = false;
};

void MpiMesh::post(const Transfer& transfer, bool is_send, int tag, Requests& requests) {
  const int peer = ranks_[static_cast<std::size_t>(transfer.peer)];
  for (std::size_t first = 0; first < transfer.bytes; first += kPieceBytes) {
    char* const data = static_cast<char*>(transfer.data) + first;
    const int count = static_cast<int>(std::min(kPieceBytes, transfer.bytes - first));
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = is_send ? MPI_Isend(data, count, MPI_BYTE, peer, tag, mpi_.comm, &request)
                             : MPI_Irecv(data, count, MPI_BYTE, peer, tag, mpi_.comm, &request);
    if (code != MPI_SUCCESS) give_up(requests, false, mpi_text(code), transfer.peer);
    requests.all.push_back(request);
    requests.peers.push_back(transfer.peer);
    if (!is_send) ++requests.receives;
    ++requests.open;
  }
}

int MpiMesh::look(Requests& requests) {
  if (requests.open == 0) return 0;
  int count = 0;
  requests.ended.resize(requests.all.size());
  requests.statuses.resize(requests.all.size());
  const int code = MPI_Testsome(static_cast<int>(requests.all.size()), requests.all.data(), &count,
                                requests.ended.data(), requests.statuses.data());
  if (code == MPI_ERR_IN_STATUS)
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i)
      if (requests.statuses[i].MPI_ERROR != MPI_SUCCESS)
        give_up(requests, false, mpi_text(requests.statuses[i].MPI_ERROR),
                requests.peers[static_cast<std::size_t>(requests.ended[i])]);
  if (code != MPI_SUCCESS) give_up(requests, false, mpi_text(code));
  requests.open -= static_cast<std::size_t>(count);
  return count;
}

// See Note [Given up]; under the mutex. The first to blame is the one given, then those whose transfers have not ended.
void MpiMesh::give_up(Requests& requests, bool late, std::string text, int peer_to_blame) {
  ExchangeError error{.peers = {}, .late = late, .text = std::move(text)};
  if (peer_to_blame >= 0) error.peers.push_back(peer_to_blame);
  for (std::size_t i = 0; i < requests.all.size(); ++i) {
    if (requests.all[i] == MPI_REQUEST_NULL) continue;
    if (i < requests.receives) MPI_Cancel(&requests.all[i]);
    const int peer = requests.peers[i];
    if (std::find(error.peers.begin(), error.peers.end(), peer) == error.peers.end()) error.peers.push_back(peer);
  }
  mpi_.over = true;
  mpi_.late = late;
  for (const int p : error.peers) mpi_.lost_ranks.push_back(ranks_[static_cast<std::size_t>(p)]);
  throw error;
}

// Asks the store whether waiting is of no more use.
bool MpiMesh::should_give_up(const Requests& requests, double seconds) const {
  const AnswerLimit limit(seconds);
  int asked = -1;
  for (std::size_t i = 0; i < requests.all.size(); ++i) {
    if (requests.all[i] == MPI_REQUEST_NULL || requests.peers[i] == asked) continue;
    asked = requests.peers[i];
    if (is_lost(setup_, asked)) return true;
  }
  return false;
}

// What an exchange says when another one has been given up.
ExchangeError MpiMesh::refusal(const std::vector<Transfer>& transfers) const {
  ExchangeError error{.peers = {}, .late = mpi_.late, .text = "this process has given up another exchange over MPI"};
  for (const int lost : mpi_.lost_ranks)
    if (const auto found = std::find(ranks_.begin(), ranks_.end(), lost); found != ranks_.end())
      error.peers.push_back(static_cast<int>(found - ranks_.begin()));
  if (!error.peers.empty()) return error;
  error.late = false;
  for (const Transfer& t : transfers) error.peers.push_back(t.peer);
  return error;
}

void MpiMesh::exchange(int lane, const std::vector<Transfer>& sends, const std::vector<Transfer>& receives,
                       double seconds) {
  check(lane >= 0 && lane < lanes_, "mpi", "lane {} is out of range: there are {}", lane, lanes_);
  const auto begin = Clock::now(), deadline = begin + clock_ticks(seconds);
  auto end = deadline, last_progress = begin, next_look = begin + kLookTime;
  const int tag = first_tag_ + lane;
  Requests requests;
  {
    const std::lock_guard lock(mpi_.mutex);
    if (mpi_.over || abandoned_) throw refusal(sends.empty() ? receives : sends);
    for (const Transfer& t : receives) post(t, false, tag, requests);
    for (const Transfer& t : sends) post(t, true, tag, requests);
  }
  for (;;) {
    const auto now = Clock::now();
    {
      const std::lock_guard lock(mpi_.mutex);
      if (mpi_.over) throw refusal(sends.empty() ? receives : sends);
      if (look(requests) > 0) last_progress = now;
      if (requests.open == 0) return;
      if (abandoned_) give_up(requests, false, "the group was destroyed");
      if (now >= end) give_up(requests, now >= deadline, "its process has ended");
    }
    if (now < last_progress + kSpinTime)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(kNap);
    // The answer may take a while, and must not make this late.
    const double ask_seconds = std::min(kAskSeconds, seconds / 4);
    if (now < next_look || now + clock_ticks(ask_seconds) > deadline) continue;
    if (end == deadline && should_give_up(requests, ask_seconds))
      end = std::min(deadline, Clock::now() + kTimeAfterEnd);
    next_look = Clock::now() + kLookTime;
  }
}

}  // namespace
}  // namespace tandem::parallel

extern "C" tandem::parallel::Mesh* tandem_make_mpi_mesh_1(const tandem::parallel::GroupSetup& setup, int rank) {
  return std::make_unique<tandem::parallel::MpiMesh>(setup, rank).release();
}
