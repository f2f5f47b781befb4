#include <tandem/tensor/cuda/pinned.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include <tandem/tensor/cuda/capture.h>

namespace tandem::cuda {
namespace {

// Unused memory that is kept beyond as much as is in use: a few large batches.
constexpr std::size_t kKept = std::size_t{256} << 20;

struct Block {
  std::size_t bytes = 0;
  std::vector<Event> uses = {};
  std::uint64_t released = 0;  // its place in the order of releases; 0 while it is in use
};
struct Cache {
  std::mutex mutex;
  std::map<const char*, Block> blocks;  // by address
  std::uint64_t releases = 0;
  std::size_t in_use = 0, unused = 0;
};
Cache& cache() {
  static auto* const c = new Cache();
  return *c;
}

// Sizes within a quarter of a power of two are one, so that batches and the last, smaller one of an epoch share blocks.
std::size_t size_class(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;  // the system gives whole ones
  if (bytes <= kPage) return kPage;
  const std::size_t step = std::max(kPage, std::bit_floor(bytes) / 4);
  return (bytes + step - 1) / step * step;
}

bool done(const Block& block) {
  return std::all_of(block.uses.begin(), block.uses.end(), [](const Event& use) { return use.done(); });
}

// Gives unused blocks back, those first that have long been unused: all of them, or what is too much. It waits without
// the lock: what is waited for may need other threads, which may need the lock.
void give_back(bool all) {
  Cache& c = cache();
  for (;;) {
    std::map<const char*, Block>::node_type oldest;
    {
      const std::lock_guard lock(c.mutex);
      if (c.unused <= (all ? 0 : kKept + c.in_use)) return;
      auto found = c.blocks.end();
      for (auto at = c.blocks.begin(); at != c.blocks.end(); ++at)
        if (at->second.released > 0 && (found == c.blocks.end() || at->second.released < found->second.released))
          found = at;
      c.unused -= found->second.bytes;
      oldest = c.blocks.extract(found);
    }
    for (const Event& use : oldest.mapped().uses) use.synchronize();
    check_status(cudaFreeHost(const_cast<char*>(oldest.key())), "pin_memory");
  }
}

}  // namespace

void* allocate_pinned(std::size_t bytes) {
  // Nor can the events of a block that is there be asked then.
  check_no_capture("pin_memory", "page-locked memory cannot be made while a graph is captured; make it before");
  const std::size_t size = size_class(bytes);
  Cache& c = cache();
  {
    const std::lock_guard lock(c.mutex);
    for (auto& [address, block] : c.blocks) {
      if (block.released == 0 || block.bytes != size || !done(block)) continue;
      block.uses.clear();
      block.released = 0;
      c.unused -= size;
      c.in_use += size;
      return const_cast<char*>(address);
    }
  }
  use(0);
  void* data = nullptr;
  cudaError_t status = cudaHostAlloc(&data, size, cudaHostAllocPortable);
  if (status == cudaErrorMemoryAllocation) {  // once more, with what lies unused
    (void)cudaGetLastError();
    empty_pinned_cache();
    status = cudaHostAlloc(&data, size, cudaHostAllocPortable);
  }
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    fail("pin_memory", "no {} bytes of page-locked memory can be had; pin less, or leave tensors in ordinary memory",
         size);
  }
  check_status(status, "pin_memory");
  const std::lock_guard lock(c.mutex);
  c.blocks[static_cast<const char*>(data)].bytes = size;
  c.in_use += size;
  return data;
}

void release_pinned(void* data) {
  if (forked()) return;  // another thread may have held the lock when the process was forked
  Cache& c = cache();
  {
    const std::lock_guard lock(c.mutex);
    Block& block = c.blocks.find(static_cast<const char*>(data))->second;
    block.released = ++c.releases;
    c.in_use -= block.bytes;
    c.unused += block.bytes;
  }
  if (current_capture() != nullptr) return;  // which waiting and freeing would spoil
  try {
    give_back(false);
  } catch (const std::exception&) {  // the device is lost
  }
}

bool note_pinned_use(const void* data, cudaStream_t stream) {
  Cache& c = cache();
  const std::lock_guard lock(c.mutex);
  const char* const at = static_cast<const char*>(data);
  auto block = c.blocks.upper_bound(at);
  if (block == c.blocks.begin()) return false;
  --block;
  if (block->second.released > 0 || at >= block->first + block->second.bytes) return false;
  auto& uses = block->second.uses;
  uses.erase(std::remove_if(uses.begin(), uses.end(), [](const Event& use) { return use.done(); }), uses.end());
  uses.emplace_back().record(stream);
  return true;
}

void empty_pinned_cache() { give_back(true); }

}  // namespace tandem::cuda
