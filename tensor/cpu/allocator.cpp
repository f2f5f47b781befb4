#include <tandem/tensor/cpu/allocator.h>

#include <array>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <vector>

namespace tandem::cpu {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr int kClasses = 64 * 8;

// Sanitizers must see every free; a cache would hide a use after it.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kCache = false;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
constexpr bool kCache = false;
#else
constexpr bool kCache = true;
#endif
#else
constexpr bool kCache = true;
#endif

// Eight size classes to each power of two: at most an eighth of a block is wasted.
struct SizeClass {
  int index;
  std::size_t bytes;
};
SizeClass size_class(std::size_t bytes) {
  if (bytes <= kAlignment * 8) {  // below, classes are multiples of the alignment
    const std::size_t blocks = bytes == 0 ? 1 : (bytes + kAlignment - 1) / kAlignment;
    return {static_cast<int>(blocks), blocks * kAlignment};
  }
  const int exponent = std::bit_width(bytes - 1) - 1;  // 2^exponent < bytes <= 2^(exponent + 1)
  const std::size_t step = std::size_t{1} << (exponent - 3);
  const std::size_t steps = (bytes + step - 1) / step;  // 9..16
  return {exponent * 8 + static_cast<int>(steps - 9), steps * step};
}

// Pools belong to devices, not threads: the thread that frees a graph is rarely the one that built it.
struct Pool {
  std::mutex mutex;
  std::array<std::vector<void*>, kClasses> free;
  MemoryStats stats;
};

Pool& pool(Device device) {
  static auto* pools = new std::array<Pool, 64>();  // outlives every tensor, so it is never destroyed
  return (*pools)[static_cast<std::size_t>(device.index()) % 64];
}

void release_cached(Pool& p) {
  for (std::size_t c = 0; c < p.free.size(); ++c) {
    for (void* block : p.free[c]) std::free(block);
    p.free[c].clear();
    p.free[c].shrink_to_fit();
  }
  p.stats.reserved = p.stats.in_use;
}

}  // namespace

void* allocate(Device device, std::size_t bytes) {
  Pool& p = pool(device);
  const SizeClass size = bytes <= SIZE_MAX / 4 ? size_class(bytes) : SizeClass{0, bytes};
  std::lock_guard lock(p.mutex);
  void* block = nullptr;
  if (bytes > SIZE_MAX / 4) {
    // falls through to the error
  } else if (auto& list = p.free[static_cast<std::size_t>(size.index)]; !list.empty()) {
    block = list.back();
    list.pop_back();
  } else {
    block = std::aligned_alloc(kAlignment, size.bytes);
    if (block == nullptr) {
      release_cached(p);
      block = std::aligned_alloc(kAlignment, size.bytes);
    }
    if (block != nullptr) p.stats.reserved += size.bytes;
  }
  if (block == nullptr)
    fail("allocate",
         "out of memory on {}: {} bytes were asked for while {} bytes are in use; use a smaller batch or model", device,
         bytes, p.stats.in_use);
  p.stats.in_use += size.bytes;
  p.stats.peak = std::max(p.stats.peak, p.stats.in_use);
  return block;
}

void release(Device device, void* data, std::size_t bytes) {
  Pool& p = pool(device);
  const SizeClass size = size_class(bytes);
  std::lock_guard lock(p.mutex);
  p.stats.in_use -= size.bytes;
  if (kCache) {
    p.free[static_cast<std::size_t>(size.index)].push_back(data);
  } else {
    p.stats.reserved -= size.bytes;
    std::free(data);
  }
}

MemoryStats memory_stats(Device device) {
  Pool& p = pool(device);
  std::lock_guard lock(p.mutex);
  return p.stats;
}

void reset_peak_memory(Device device) {
  Pool& p = pool(device);
  std::lock_guard lock(p.mutex);
  p.stats.peak = p.stats.in_use;
}

void empty_cache() {
  for (int i = 0; i < 64; ++i) {
    Pool& p = pool(Device(DeviceType::cpu, i));
    std::lock_guard lock(p.mutex);
    release_cached(p);
  }
}

}  // namespace tandem::cpu
