#include <tandem/tensor/cuda/graph_memory.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include <tandem/tensor/cuda/capture.h>
#include <tandem/tensor/cuda/runtime.h>

namespace tandem::cuda {
namespace {

constexpr std::size_t kAlignment = 256, kSegment = std::size_t{2} << 20;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return std::max(unit, (bytes + unit - 1) / unit * unit); }

// A piece of memory from cudaMalloc, which blocks are cut from.
struct Segment {
  const GraphMemory* owner = nullptr;  // null when the graph is gone
  int device = 0;
  std::size_t bytes = 0, taken = 0;
  std::map<char*, std::size_t> free = {};  // pieces by address; neighbours are one
};

struct Segments {
  std::mutex mutex;
  std::map<char*, Segment> all;  // by address
  std::atomic<bool> any{false};  // since the start; else nobody need look
};
Segments& segments() {
  static auto* const s = new Segments();
  return *s;
}

using Place = std::map<char*, Segment>::iterator;

Place find(Segments& s, const void* data) {
  auto* const at = const_cast<char*>(static_cast<const char*>(data));
  Place place = s.all.upper_bound(at);
  if (place == s.all.begin()) return s.all.end();
  --place;
  return at < place->first + place->second.bytes ? place : s.all.end();
}

Place give_to_system(Segments& s, Place place) {
  // Waits for the device, and is not captured. CUDA may be gone at the end of the program: no errors.
  const FreeOfCapture free_of_capture;
  if (!forked()) (void)cudaFree(place->first);
  return s.all.erase(place);
}

void add_free(Segment& segment, char* data, std::size_t bytes) {
  auto at = segment.free.emplace(data, bytes).first;
  if (const auto next = std::next(at); next != segment.free.end() && at->first + at->second == next->first) {
    at->second += next->second;
    segment.free.erase(next);
  }
  if (at == segment.free.begin()) return;
  const auto before = std::prev(at);
  if (before->first + before->second != at->first) return;
  before->second += at->second;
  segment.free.erase(at);
}

}  // namespace

void* GraphMemory::allocate(std::size_t bytes) {
  const std::size_t size = round_up(bytes, kAlignment);
  Segments& s = segments();
  const std::lock_guard lock(s.mutex);
  Segment* best = nullptr;
  std::map<char*, std::size_t>::iterator piece;
  for (auto& [address, segment] : s.all) {
    if (segment.owner != this) continue;
    for (auto at = segment.free.begin(); at != segment.free.end(); ++at) {
      if (at->second < size || (best != nullptr && at->second >= piece->second)) continue;
      best = &segment;
      piece = at;
    }
  }
  if (best == nullptr) {
    const std::size_t fresh = round_up(size, kSegment);
    const FreeOfCapture free_of_capture;
    void* data = nullptr;
    const cudaError_t status = cudaMalloc(&data, fresh);
    if (status == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      return nullptr;
    }
    check_status(status, "allocate");
    s.any = true;
    best = &s.all[static_cast<char*>(data)];
    *best = {.owner = this, .device = device_, .bytes = fresh};
    piece = best->free.emplace(static_cast<char*>(data), fresh).first;
  }
  char* const data = piece->first;
  const std::size_t rest = piece->second - size;
  best->free.erase(piece);
  if (rest > 0) best->free.emplace(data + size, rest);
  best->taken += size;
  return data;
}

bool GraphMemory::holds(const void* data) const {
  Segments& s = segments();
  const std::lock_guard lock(s.mutex);
  const Place place = find(s, data);
  return place != s.all.end() && place->second.owner == this;
}

GraphMemory::~GraphMemory() {
  Segments& s = segments();
  const std::lock_guard lock(s.mutex);
  for (Place place = s.all.begin(); place != s.all.end();) {
    Segment& segment = place->second;
    if (segment.owner == this) segment.owner = nullptr;
    place = segment.owner == nullptr && segment.taken == 0 ? give_to_system(s, place) : std::next(place);
  }
}

bool release_graph_memory(void* data, std::size_t bytes) {
  Segments& s = segments();
  if (!s.any) return false;
  const std::lock_guard lock(s.mutex);
  const Place place = find(s, data);
  if (place == s.all.end()) return false;
  const std::size_t size = round_up(bytes, kAlignment);
  add_free(place->second, static_cast<char*>(data), size);
  place->second.taken -= size;
  if (place->second.owner == nullptr && place->second.taken == 0) give_to_system(s, place);
  return true;
}

std::size_t graph_memory_reserved(int device) {
  Segments& s = segments();
  const std::lock_guard lock(s.mutex);
  std::size_t bytes = 0;
  for (const auto& [address, segment] : s.all)
    if (segment.device == device) bytes += segment.bytes;
  return bytes;
}

}  // namespace tandem::cuda
