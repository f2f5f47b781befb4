// The recording: each thread appends to a buffer of its own, and whoever writes reads what the threads have published.
#include <tandem/tensor/trace.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include <tandem/tensor/error.h>
#include <tandem/tensor/trace_events.h>

namespace tandem::trace {
namespace {

constexpr std::int64_t kChunk = 2048;

struct Chunk {
  Event events[kChunk];
  std::unique_ptr<Chunk> next;
};

// How many events of a rank have come after the limit. Never removed.
struct LeftOut {
  int rank;
  LeftOut* next;
  std::atomic<std::int64_t> count = 0;
};

// Written by the thread that has it. The first `size` events never change in a session, so that another thread may read
// them. A new session is noticed by the owner, who begins anew in the same memory.
struct Buffer {
  std::atomic<std::uint32_t> session = 0;
  std::atomic<std::int64_t> size = 0;
  std::atomic<LeftOut*> left_out = nullptr;
  std::unique_ptr<Chunk> first;
  Chunk* current = nullptr;
  std::int64_t before = 0;  // events of threads that had this buffer before

  void restart(std::uint32_t of) {
    size.store(0, std::memory_order_relaxed);
    for (LeftOut* l = left_out; l != nullptr; l = l->next) l->count.store(0, std::memory_order_relaxed);
    current = nullptr;
    before = 0;
    session.store(of, std::memory_order_release);
  }
  // Counts an event; false when memory is short.
  bool leave_out(int rank) {
    LeftOut* l = left_out.load(std::memory_order_relaxed);
    while (l != nullptr && l->rank != rank) l = l->next;
    if (l == nullptr) {
      l = new (std::nothrow) LeftOut{.rank = rank, .next = left_out.load(std::memory_order_relaxed)};
      if (l == nullptr) return false;
      left_out.store(l, std::memory_order_release);
    }
    l->count.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  // The place of the next event; null when memory is short.
  Event* place(std::int64_t at) {
    if (at % kChunk == 0) {
      std::unique_ptr<Chunk>& next = current == nullptr ? first : current->next;
      if (next == nullptr) next.reset(new (std::nothrow) Chunk);
      if (next == nullptr) return nullptr;
      current = next.get();
    }
    return &current->events[at % kChunk];
  }
};

// Never destroyed: detached threads may still record when the program ends.
struct Registry {
  std::mutex mutex;  // also keeps a new session from beginning while events are read
  std::vector<std::unique_ptr<Buffer>> all;
  std::vector<Buffer*> free;  // of threads that have ended; what is in them stays
  std::uint32_t sessions = 0;
  std::atomic<std::int32_t> threads = 0;
};
Registry& registry() {
  static auto* made = new Registry();
  return *made;
}

std::atomic<std::uint32_t> g_last = 0;  // the session that was started last
std::atomic<std::int64_t> g_limit = 0, g_lost = 0;

// The calling thread's buffer, from its first event to its end.
class Lease {
 public:
  Lease() {
    Registry& r = registry();
    const std::lock_guard lock(r.mutex);
    if (r.free.empty()) {
      r.free.reserve(r.all.size() + 1);  // the end of a thread must not fail
      r.all.push_back(std::make_unique<Buffer>());
      buffer_ = r.all.back().get();
    } else {
      buffer_ = r.free.back();
      r.free.pop_back();
    }
    buffer_->before = buffer_->size.load(std::memory_order_relaxed);
    number_ = r.threads.fetch_add(1, std::memory_order_relaxed);
  }
  ~Lease() {
    const std::lock_guard lock(registry().mutex);
    registry().free.push_back(buffer_);
    t_ended = true;
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  // Null in a thread that is ending.
  static Lease* of_this_thread() {
    if (t_ended) return nullptr;
    static thread_local Lease lease;
    return &lease;
  }
  Buffer& buffer() const { return *buffer_; }
  std::int32_t number() const { return number_; }

 private:
  static thread_local constinit bool t_ended;
  Buffer* buffer_;
  std::int32_t number_;
};
thread_local constinit bool Lease::t_ended = false;

}  // namespace

namespace detail {

std::atomic<std::uint32_t> session = 0;

void record(std::uint32_t of, const char* name, Track track, Detail detail, std::int64_t begin,
            std::int64_t end) noexcept {
  if (of != g_last.load(std::memory_order_relaxed)) return;  // of a recording that was thrown away
  const int rank = t_thread_context.traced_rank;
  Lease* lease = nullptr;
  try {
    lease = Lease::of_this_thread();
  } catch (const std::bad_alloc&) {
  }
  if (lease == nullptr) {
    g_lost.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  Buffer& buffer = lease->buffer();
  if (buffer.session.load(std::memory_order_relaxed) != of) buffer.restart(of);
  const std::int64_t size = buffer.size.load(std::memory_order_relaxed);
  const std::int64_t own = size - buffer.before;
  Event* const place = own < g_limit.load(std::memory_order_relaxed) ? buffer.place(size) : nullptr;
  if (place == nullptr) {
    if (!buffer.leave_out(rank)) g_lost.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (track.kind == nullptr) track = t_track;
  if (track.kind == nullptr) track = {kThreads, lease->number()};
  *place = {name, track.kind, track.number, rank, detail, begin, end};
  buffer.size.store(size + 1, std::memory_order_release);
}

}  // namespace detail

std::int64_t now() {
  using std::chrono::steady_clock;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

void start(const Options& options) {
  check(options.events_per_thread >= 1, "trace", "events_per_thread is {}; give 1 or more", options.events_per_thread);
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  if (is_on()) return;
  if (++r.sessions == 0) ++r.sessions;
  g_limit = options.events_per_thread;
  g_lost = 0;
  g_last = r.sessions;
  detail::session = r.sessions;
}

void stop() { detail::session = 0; }

Recording collect() {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  Recording result;
  if (g_lost > 0) result.left_out[-1] = g_lost;
  for (const auto& buffer : r.all) {
    if (buffer->session.load(std::memory_order_acquire) != g_last) continue;
    std::int64_t left = buffer->size.load(std::memory_order_acquire);
    for (const std::unique_ptr<Chunk>* next = &buffer->first; left > 0; left -= kChunk) {
      const Chunk& chunk = **next;  // the owner may be making the one after the last
      result.events.insert(result.events.end(), chunk.events, chunk.events + std::min(left, kChunk));
      next = &chunk.next;
    }
    for (const LeftOut* l = buffer->left_out.load(std::memory_order_acquire); l != nullptr; l = l->next)
      if (const std::int64_t count = l->count.load(std::memory_order_relaxed); count > 0)
        result.left_out[l->rank] += count;
  }
  return result;
}

}  // namespace tandem::trace
