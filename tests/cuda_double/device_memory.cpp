// Device memory is host memory whose owner is remembered. Without protection each block is an allocation of its own, of
// exactly its size, so that AddressSanitizer sees a kernel leave it and ThreadSanitizer sees a free that races.
// With TANDEM_CUDA_DOUBLE_PROTECT=1 blocks lie in one mapping a device that is open only while work runs there: a host
// that dereferences a device pointer faults, unless it does so just then.
// What it cannot catch: fragmentation, alignment beyond 256 bytes, a kernel that gets a host pointer.
#include "device_memory.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "runtime.h"

namespace cuda_double {
namespace {

constexpr int kMaxDevices = 64;
constexpr size_t kPage = 4096;

bool is_protected() {
  static const bool is = variable("TANDEM_CUDA_DOUBLE_PROTECT", "0") == "1";
  return is;
}

/// The mapping of a device in the protected mode. It is much larger than the device, since a block may wait for its
/// stream to be freed while the next ones are already lent.
class Arena {
 public:
  Arena() : bytes_(8 * memory_limit()) {
    void* mapped = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) die("cannot map {} bytes for a protected device", bytes_);
    begin_ = static_cast<char*>(mapped);
    free_[begin_] = bytes_;
  }
  char* take(size_t bytes) {
    size_t size = rounded(bytes);
    std::lock_guard lock(mutex_);
    for (auto [at, available] : free_) {
      if (available < size) continue;
      free_.erase(at);
      if (available > size) free_[at + size] = available - size;
      return at;
    }
    die("the protected arena is used up");
  }
  void give_back(char* at, size_t bytes) {
    std::lock_guard lock(mutex_);
    auto next = free_.emplace(at, rounded(bytes)).first;
    if (next != free_.begin() && std::prev(next)->first + std::prev(next)->second == at) {
      auto before = std::prev(next);
      before->second += next->second;
      free_.erase(next);
      next = before;
    }
    if (auto after = std::next(next); after != free_.end() && next->first + next->second == after->first) {
      next->second += after->second;
      free_.erase(after);
    }
  }
  void enter() {
    std::lock_guard lock(mutex_);
    if (users_++ == 0) mprotect(begin_, bytes_, PROT_READ | PROT_WRITE);
  }
  void leave() {
    std::lock_guard lock(mutex_);
    if (--users_ == 0) mprotect(begin_, bytes_, PROT_NONE);
  }

 private:
  static size_t rounded(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
  std::mutex mutex_;
  size_t bytes_;
  char* begin_;
  std::map<char*, size_t> free_;
  int users_ = 0;
};

Arena& arena(int device) {
  static auto* arenas = new std::vector<Arena>(static_cast<size_t>(device_count()));
  return (*arenas)[static_cast<size_t>(device)];
}

std::mutex arenas_mutex;  // taken by host threads alone
std::atomic<uint64_t> peers[kMaxDevices];
MemoryUse uses[kMaxDevices];

std::map<const char*, Block>& blocks() {
  static auto* all = new std::map<const char*, Block>;
  return *all;
}

bool lend(MemoryUse& use, size_t bytes, Origin origin) {
  if (use.direct + use.used + bytes > memory_limit()) return false;
  if (origin == Origin::pool) {
    use.used += bytes;
    use.used_high = std::max(use.used_high, use.used);
    use.reserved = std::max(use.reserved, use.used);
    use.reserved_high = std::max(use.reserved_high, use.reserved);
  } else {
    use.direct += bytes;
  }
  use.reserved = std::min(use.reserved, memory_limit() - use.direct);  // the driver takes back what a pool only keeps
  return true;
}

}  // namespace

size_t memory_limit() {
  static const size_t limit = std::stoull(variable("TANDEM_CUDA_DOUBLE_MEMORY", "1073741824"));
  return limit;
}

std::optional<Block> allocate(size_t bytes, int device, Origin origin) {
  Block block = {nullptr, bytes, device, origin};
  std::lock_guard lock(arenas_mutex);
  if (origin != Origin::pinned && !lend(uses[device], bytes, origin)) return {};
  if (origin != Origin::pinned && is_protected()) {
    block.begin = arena(device).take(bytes);
  } else {
    void* memory = nullptr;
    if (posix_memalign(&memory, origin == Origin::nccl ? kPage : 256, bytes))
      die("no memory of the host for {} bytes", bytes);
    block.begin = static_cast<char*>(memory);
  }
  blocks()[block.begin] = block;
  return block;
}

void poison(const Block& block) { std::memset(block.begin, 0xff, block.bytes); }

Block forget(void* pointer, const char* call) {
  std::lock_guard lock(arenas_mutex);
  auto found = blocks().find(static_cast<char*>(pointer));
  if (found == blocks().end()) die("{}: {} is not the begin of an allocation", call, pointer);
  Block block = found->second;
  blocks().erase(found);
  if (block.origin == Origin::pool) uses[block.device].used -= block.bytes;
  if (block.origin == Origin::direct || block.origin == Origin::nccl) uses[block.device].direct -= block.bytes;
  return block;
}

void release(const Block& block) {
  if (block.origin != Origin::pinned && is_protected())
    arena(block.device).give_back(block.begin, block.bytes);
  else
    std::free(block.begin);
}

std::optional<Block> find(const void* pointer) {
  auto* address = static_cast<const char*>(pointer);
  std::lock_guard lock(arenas_mutex);
  auto next = blocks().upper_bound(address);
  if (next == blocks().begin()) return {};
  const Block& block = std::prev(next)->second;
  if (address >= block.begin + block.bytes) return {};
  return block;
}

std::optional<Block> find_range(const void* pointer, size_t bytes, const char* what) {
  std::optional<Block> block = find(pointer);
  if (block && static_cast<const char*>(pointer) + bytes > block->begin + block->bytes)
    die("{}: {} bytes at {} leave their allocation of {} bytes at {}", what, bytes, pointer, block->bytes,
        static_cast<void*>(block->begin));
  return block;
}

void require_range(const void* pointer, size_t bytes, int device, const char* what) {
  if (bytes == 0) return;
  std::optional<Block> block = find_range(pointer, bytes, what);
  if (!block || block->origin == Origin::pinned) die("{}: {} is not device memory", what, pointer);
  if (block->device != device)
    die("{}: {} is memory of device {}, used on device {}", what, pointer, block->device, device);
}

MemoryUse memory_use(int device) {
  std::lock_guard lock(arenas_mutex);
  return uses[device];
}

void trim_pool(int device) {
  std::lock_guard lock(arenas_mutex);
  MemoryUse& use = uses[device];
  if (use.reserved > use.release_threshold) use.reserved = std::max<size_t>(use.used, use.release_threshold);
}

void trim_pool(int device, size_t keep) {
  std::lock_guard lock(arenas_mutex);
  MemoryUse& use = uses[device];
  use.reserved = std::max(use.used, std::min(use.reserved, keep));
}

void set_release_threshold(int device, uint64_t bytes) {
  std::lock_guard lock(arenas_mutex);
  uses[device].release_threshold = bytes;
}

void reset_used_high(int device) {
  std::lock_guard lock(arenas_mutex);
  uses[device].used_high = uses[device].used;
}

void reset_reserved_high(int device) {
  std::lock_guard lock(arenas_mutex);
  uses[device].reserved_high = uses[device].reserved;
}

bool enable_peer(int device, int peer) {
  uint64_t bit = uint64_t(1) << peer;
  return (peers[device].fetch_or(bit, std::memory_order_relaxed) & bit) == 0;
}

DeviceAccess::DeviceAccess(int device) {
  if (device < 0 || !is_protected()) return;
  devices_ = peers[device].load(std::memory_order_relaxed) | uint64_t(1) << device;
  for (int i = 0; i < device_count(); ++i)
    if (devices_ >> i & 1) arena(i).enter();
}

DeviceAccess::~DeviceAccess() {
  if (devices_ == 0) return;
  for (int i = 0; i < device_count(); ++i)
    if (devices_ >> i & 1) arena(i).leave();
}

}  // namespace cuda_double
