#include <tandem/parallel/comm/shm_memory.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <sstream>
#include <thread>

#include <fmt/format.h>

#include <tandem/parallel/comm/peer_wait.h>
#include <tandem/parallel/comm/rendezvous.h>
#include <tandem/parallel/comm/store_limits.h>

namespace tandem::parallel {
namespace {

using Clock = std::chrono::steady_clock;

// The rings of all pairs of ranks share this much, within limits for each. In a small ring the same lines go back and
// forth between the cores, which is slow.
constexpr std::size_t kAllRingsBytes = 4 << 20, kMaxRingBytes = 1 << 20, kMinRingBytes = 4 << 10;

std::size_t ring_bytes_for(std::size_t members) {
  const std::size_t pairs = std::max<std::size_t>(members * (members - 1), 1), share = kAllRingsBytes / pairs;
  return std::clamp(share - share % kMinRingBytes, kMinRingBytes, kMaxRingBytes);
}

}  // namespace

SharedMemory::SharedMemory(const GroupSetup& setup)
    : setup_(setup), rank_(static_cast<std::size_t>(setup.place())), ring_bytes_(ring_bytes_for(setup.ranks.size())) {}

bool SharedMemory::said_to_have_ended(int member) const {
  try {
    return setup_.store->check(ended_key(setup_.ranks[static_cast<std::size_t>(member)]));
  } catch (const Error&) {  // the store has gone
    return false;
  }
}

// The channels from rank 0 to the others come first, then those from rank 1.
Channel& SharedMemory::channel(int from, int to) const {
  const auto place =
      static_cast<std::size_t>(from) * (members() - 1) + static_cast<std::size_t>(to < from ? to : to - 1);
  char* const first = reinterpret_cast<char*>(&member(static_cast<int>(members())));
  return *reinterpret_cast<Channel*>(first + place * (sizeof(Channel) + ring_bytes_));
}

std::size_t SharedMemory::board_bytes(std::size_t members) {
  const std::size_t channels = members * (members - 1) * (sizeof(Channel) + ring_bytes_for(members));
  return sizeof(Board) + members * sizeof(Member) + channels;
}

void SharedMemory::make_board(void* at, std::size_t members) {
  char* const end = static_cast<char*>(at) + board_bytes(members);
  Member* member = reinterpret_cast<Member*>(new (at) Board() + 1);
  for (std::size_t i = 0; i < members; ++i) new (member++) Member();
  for (char* next = reinterpret_cast<char*>(member); next < end; next += sizeof(Channel) + ring_bytes_for(members))
    new (next) Channel();
}

// --- Threads ---

struct ThreadMemory::Block {
  explicit Block(std::size_t members)
      : bytes(board_bytes(members)), board(::operator new(bytes, std::align_val_t(alignof(Member)))) {
    make_board(board, members);
  }
  ~Block() { ::operator delete(board, std::align_val_t(alignof(Member))); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  std::size_t bytes;
  void* board;
};

ThreadMemory::ThreadMemory(const GroupSetup& setup) : SharedMemory(setup) {
  // The first thread that comes makes the block, the last one that leaves frees it. A name is used once in a job.
  static std::mutex mutex;
  static std::map<std::pair<const Store*, std::string>, std::weak_ptr<Block>> blocks;
  const std::lock_guard lock(mutex);
  std::erase_if(blocks, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Block>& known = blocks[{setup.store.get(), setup.name}];
  block_ = known.lock();
  if (!block_) known = block_ = std::make_shared<Block>(setup.ranks.size());
  board_ = static_cast<Board*>(block_->board);
}

Location ThreadMemory::place_of(const void* data, std::size_t) const {
  return {.area = 0, .offset = reinterpret_cast<std::intptr_t>(data)};
}
char* ThreadMemory::address(int, Location place) const { return std::bit_cast<char*>(place.offset); }
char* ThreadMemory::piece(int, std::size_t) const { return nullptr; }
bool ThreadMemory::ended(int member) const { return said_to_have_ended(member); }
void ThreadMemory::wait_until_others_outside() const {
  for (std::size_t i = 0; i < members(); ++i)
    while (other_is_inside(i)) std::this_thread::yield();
}
void ThreadMemory::all_came() {}

// --- Processes ---

namespace {

constexpr auto kStoppedTime = std::chrono::seconds(1);  // a process that is in a step for longer does not run
constexpr std::size_t kRoomBytes = kSmallBytes + 2 * ProcessMemory::kPieceBytes;  // for each rank

// What each rank tells the others through the store.
struct Record {
  pid_t process = 0;
  int file = -1, error = 0;  // rank 0's: the segment, or why there is none
  std::string host_name, host;
};

std::string to_text(const Record& r) {
  return fmt::format("{} {} {} {} {}", r.process, r.file, r.error, r.host_name, r.host);
}
Record from_text(const std::string& text) {
  Record r;
  std::istringstream in(text);
  in >> r.process >> r.file >> r.error >> r.host_name >> std::ws;
  std::getline(in, r.host);
  return r;
}

std::string key_of(const GroupSetup& setup, std::size_t member) { return fmt::format("{}/shm/{}", setup.name, member); }

void check_one_host(const GroupSetup& setup, const std::vector<Record>& records) {
  const Record& first = records.front();
  for (std::size_t i = 1; i < records.size(); ++i)
    check(records[i].host == first.host, "shm",
          "{} is on host '{}' and {} on {}'{}': ranks that share memory must run on one host, in one "
          "container; use the backend \"gloo\"",
          setup.rank_name(0), first.host_name, setup.rank_name(static_cast<int>(i)),
          records[i].host_name == first.host_name ? "another one, or in a container, named " : "",
          records[i].host_name);
}

// A pidfd is readable once the process has ended. One serves all groups of this process.
std::shared_ptr<FileDescriptor> watch(pid_t process) {
  static std::mutex mutex;
  static std::map<pid_t, std::weak_ptr<FileDescriptor>> watched;
  const std::lock_guard lock(mutex);
  std::erase_if(watched, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<FileDescriptor>& known = watched[process];
  std::shared_ptr<FileDescriptor> result = known.lock();
  if (!result) known = result = std::make_shared<FileDescriptor>(static_cast<int>(syscall(SYS_pidfd_open, process, 0)));
  return result;
}

}  // namespace

ProcessMemory::ProcessMemory(const GroupSetup& setup, FunctionRef<void()> meanwhile) : SharedMemory(setup) {
  const std::size_t members = setup.ranks.size(), bytes = whole_pages(board_bytes(members)) + members * kRoomBytes;
  Record mine;
  mine.process = getpid();
  mine.host = host_id();
  char host_name[256] = {};
  gethostname(host_name, sizeof host_name - 1);
  mine.host_name = host_name[0] != 0 ? host_name : "localhost";
  if (rank_ == 0) {
    mine.error = make_memory_file(bytes, file_);
    if (mine.error == 0) mine.error = reserve(file_, 0, bytes);
    if (mine.error == 0) mine.error = map_file(file_, bytes, segment_);
    if (mine.error == 0) make_board(segment_.data(), members);
    mine.file = file_.get();
  }
  setup.store->set(key_of(setup, rank_), to_text(mine));
  const PeerWait others(setup);
  std::vector<Record> records;
  for (std::size_t i = 0; i < members; ++i)
    records.push_back(from_text(others.value_of(key_of(setup, i), static_cast<int>(i), meanwhile)));
  check_one_host(setup, records);
  const Record& first = records.front();
  check(first.error == 0, "shm", "{} bytes of shared memory for {} ranks cannot be had: {}", bytes, members,
        std::strerror(first.error));
  if (rank_ != 0) {
    FileDescriptor file;
    int error = open_file_of(first.process, first.file, file);
    if (error == 0) error = map_file(file, bytes, segment_);
    check(error == 0, "shm", "{} cannot map the memory of {} (process {}): {}", setup.rank_name(setup.place()),
          setup.rank_name(0), first.process, std::strerror(error));
  }
  board_ = reinterpret_cast<Board*>(segment_.data());
  for (const Record& r : records) processes_.push_back(watch(r.process));
}

void ProcessMemory::all_came() {
  file_ = FileDescriptor();
  setup_.store->remove(key_of(setup_, rank_));
}

Location ProcessMemory::place_of(const void* data, std::size_t bytes) const {
  for (std::size_t i = 0; i < allocations_.size(); ++i) {
    const Allocation& a = allocations_[i];
    const auto offset =
        reinterpret_cast<std::intptr_t>(data) - reinterpret_cast<std::intptr_t>(a.mapping->data() + rank_ * a.stride);
    if (offset >= 0 && static_cast<std::size_t>(offset) + bytes <= a.stride)
      return {.area = static_cast<std::int64_t>(i), .offset = offset};
  }
  return {};
}

char* ProcessMemory::room(int member) const {
  return segment_.data() + whole_pages(board_bytes(members())) + static_cast<std::size_t>(member) * kRoomBytes;
}

char* ProcessMemory::address(int member, Location place) const {
  if (place.area == Location::kWithPost) return room(member) + place.offset;
  const Allocation& a = allocations_[static_cast<std::size_t>(place.area)];
  return a.mapping->data() + static_cast<std::size_t>(member) * a.stride + place.offset;
}

char* ProcessMemory::piece(int member, std::size_t which) const {
  return room(member) + kSmallBytes + which * kPieceBytes;
}

bool ProcessMemory::ended(int member) const {
  const auto m = static_cast<std::size_t>(member);
  if (const int process = processes_[m]->get(); process >= 0) {
    pollfd end{process, POLLIN, 0};
    return poll(&end, 1, 0) > 0;
  }
  return said_to_have_ended(member);  // the system has no pidfd, or the process had ended already
}

void ProcessMemory::wait_until_others_outside() const {
  const auto limit = Clock::now() + kStoppedTime;
  for (std::size_t i = 0; i < members(); ++i)
    while (other_is_inside(i) && !ended(static_cast<int>(i)) && Clock::now() < limit) std::this_thread::yield();
}

void ProcessMemory::add(std::shared_ptr<Mapping> mapping, std::size_t stride) {
  allocations_.push_back({std::move(mapping), stride});
}

std::vector<bool> ProcessMemory::used() const {
  std::vector<bool> result;
  for (const Allocation& a : allocations_) result.push_back(a.mapping.use_count() > 1);
  return result;
}

void ProcessMemory::remove_unused(const std::vector<bool>& used) {
  std::vector<Allocation> kept;
  for (std::size_t i = 0; i < allocations_.size(); ++i)
    if (used[i]) kept.push_back(std::move(allocations_[i]));
  allocations_ = std::move(kept);
}

}  // namespace tandem::parallel
