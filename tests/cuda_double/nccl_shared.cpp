// The shared memory of a communicator. What it models of the bootstrap: the maker of the id must live until all ranks
// have joined; a rank that does not come is waited for; a dead rank is no error by itself.
#include "nccl_shared.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "quiet.h"
#include "runtime.h"

namespace cuda_double {
namespace {

constexpr char kIdMagic[8] = {'t', 'a', 'n', 'd', 'e', 'm', 'i', 'd'};
constexpr timespec kLook = {0, 20'000'000};  // how often a waiting thread looks whether it should stop

struct Id {
  char magic[8];
  int32_t process, file;
  uint64_t token;
};
static_assert(sizeof(Id) <= sizeof(ncclUniqueId));

std::mutex files_mutex;
std::map<uint64_t, int>& files() {  // made here, and not yet used by a communicator of this process
  static auto* all = new std::map<uint64_t, int>;
  return *all;
}

void close_file(uint64_t token) {
  std::lock_guard lock(files_mutex);
  auto found = files().find(token);
  if (found == files().end()) return;
  close(found->second);
  files().erase(found);
}

}  // namespace

struct Segment::Header {
  uint64_t token;
  std::atomic<uint32_t> ranks, joined, arrived, generation, activity, failed;
  struct Rank {
    std::atomic<uint32_t> taken;
    int32_t device;
    uint64_t host;
  } rank[kMaxRanks];
};

Segment::Segment(void* memory, size_t bytes, int ranks) : memory_(memory), bytes_(bytes), ranks_(ranks) {}
Segment::~Segment() { munmap(memory_, bytes_); }

size_t Segment::bytes_for(int ranks) {
  auto count = static_cast<size_t>(ranks);
  return sizeof(Header) + count * sizeof(Slot) + count * count * sizeof(Mail);
}

Segment::Header& Segment::header() const { return *static_cast<Header*>(memory_); }

Slot& Segment::slot(int rank) const {
  return reinterpret_cast<Slot*>(static_cast<char*>(memory_) + sizeof(Header))[rank];
}

Mail& Segment::mail(int from, int to) const { return reinterpret_cast<Mail*>(&slot(ranks_))[from * ranks_ + to]; }

ncclResult_t Segment::make_id(ncclUniqueId* id) {
  static std::atomic<uint64_t> count{0};
  int file = memfd_create("tandem_cuda_double", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, sizeof(Header)) != 0) return ncclSystemError;
  timespec now = {};
  clock_gettime(CLOCK_REALTIME, &now);
  Id made = {{}, getpid(), file, static_cast<uint64_t>(now.tv_nsec) << 32 | ++count};
  std::memcpy(made.magic, kIdMagic, sizeof kIdMagic);
  if (pwrite(file, &made.token, sizeof made.token, offsetof(Header, token)) != sizeof made.token)
    return ncclSystemError;
  std::memset(id, 0, sizeof *id);
  std::memcpy(id, &made, sizeof made);
  std::lock_guard lock(files_mutex);
  files()[made.token] = file;
  return ncclSuccess;
}

ncclResult_t Segment::join(const ncclUniqueId& unique_id, int ranks, int rank, uint64_t host, int device,
                           const std::atomic<bool>& stop, std::unique_ptr<Segment>& joined) {
  Id id = {};
  std::memcpy(&id, &unique_id, sizeof id);
  if (std::memcmp(id.magic, kIdMagic, sizeof kIdMagic) != 0)
    return reject(ncclInvalidArgument, "ncclCommInitRank: not a unique id");
  std::string path = fmt::format("/proc/{}/fd/{}", id.process, id.file);
  int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return reject(ncclSystemError, "ncclCommInitRank: the maker of the unique id is gone");
  size_t bytes = bytes_for(ranks);
  struct stat status = {};
  fstat(file, &status);
  if (static_cast<size_t>(status.st_size) < bytes && ftruncate(file, static_cast<off_t>(bytes)) != 0)
    return ncclSystemError;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return ncclSystemError;
  std::unique_ptr<Segment> segment(new Segment(memory, bytes, ranks));
  Header& header = segment->header();
  if (header.token != id.token) return reject(ncclSystemError, "ncclCommInitRank: the maker of the unique id is gone");

  uint32_t expected = 0;
  if (!header.ranks.compare_exchange_strong(expected, static_cast<uint32_t>(ranks)) &&
      expected != static_cast<uint32_t>(ranks))
    return reject(ncclInvalidArgument, "ncclCommInitRank: {} ranks here, {} elsewhere", ranks, expected);
  if (header.rank[rank].taken.exchange(1) != 0)
    return reject(ncclInvalidUsage, "ncclCommInitRank: rank {} has joined twice", rank);
  header.rank[rank].host = host;
  header.rank[rank].device = device;
  header.joined.fetch_add(1);
  futex_wake(header.joined, true);
  for (uint32_t seen; (seen = header.joined.load()) < static_cast<uint32_t>(ranks);) {
    if (stop.load(std::memory_order_relaxed)) return ncclInternalError;
    futex_wait(header.joined, seen, true, &kLook);
  }
  close_file(id.token);
  for (int i = 0; i < ranks; ++i)
    for (int j = 0; j < i; ++j)
      if (header.rank[i].host == header.rank[j].host && header.rank[i].device == header.rank[j].device)
        return reject(ncclInvalidUsage, "duplicate GPU detected: ranks {} and {} are both on device {} of one host", j,
                      i, device);
  joined = std::move(segment);
  return ncclSuccess;
}

bool Segment::barrier(const std::atomic<bool>& stop) {
  Header& shared = header();
  uint32_t generation = shared.generation.load();
  if (shared.arrived.fetch_add(1) + 1 == static_cast<uint32_t>(ranks_)) {
    shared.arrived.store(0);
    shared.generation.store(generation + 1);
    futex_wake(shared.generation, true);
    return true;
  }
  while (shared.generation.load() == generation) {
    if (stop.load(std::memory_order_relaxed) || failed()) return false;
    futex_wait(shared.generation, generation, true, &kLook);
  }
  return true;
}

uint32_t Segment::activity() const { return header().activity.load(); }

void Segment::announce() {
  header().activity.fetch_add(1);
  futex_wake(header().activity, true);
}

void Segment::wait_activity(uint32_t seen) const { futex_wait(header().activity, seen, true, &kLook); }

void Segment::fail() {
  header().failed.store(1);
  wake();
}

bool Segment::failed() const { return header().failed.load() != 0; }

void Segment::wake() {
  futex_wake(header().generation, true);
  futex_wake(header().activity, true);
}

}  // namespace cuda_double
