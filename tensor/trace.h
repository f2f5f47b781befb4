// A timeline of where time goes: spans and instants, each on a track, kept by the thread that records them and written
// as a file for Perfetto (docs/tracing.md). While nothing is recorded a point is one relaxed load of a flag.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include <tandem/tensor/device.h>
#include <tandem/tensor/thread_context.h>

namespace tandem::trace {

/// A row of the timeline: what it shows, and a number where there are several. Texts are string literals.
struct Track {
  const char* kind = nullptr;  // null: that of the calling thread
  int number = -1;             // -1: there is one
};
// All tracks there are, besides those of threads: "main" for the first of a rank, then "thread 2", ...
inline constexpr Track kThisThread{};
inline constexpr Track kCommunication{"communication"};  // the thread that runs a group's collectives
inline constexpr Track kMessages{"messages"};            // those that run its sends and receives
constexpr Track device_track(Device device) { return {device.is_cpu() ? "cpu:" : "cuda:", device.index()}; }
constexpr Track loader_track(int worker) { return {"loader", worker}; }
constexpr Track bucket_track(int bucket) { return {"bucket", bucket}; }

/// A number that is shown with an event; none where the name is null.
struct Detail {
  const char* name = nullptr;
  std::int64_t value = 0;
};

/// How much is recorded.
struct Options {
  std::int64_t events_per_thread = 1 << 20;  // of 56 bytes; what comes after them is counted, and the file says so
};

/// Begins to record, in all threads of this process, and forgets what was recorded before; does nothing while it is on
/// already. Error for an events_per_thread below 1.
void start(const Options& options = {});
/// Ends it. What was recorded stays until the next start, and a span that has begun is still recorded.
void stop();
/// Writes what this process has recorded to a file, which is replaced as a whole. Spans that have not ended are left
/// out. Of several ranks use parallel::write_trace. Error when the file cannot be written.
void write(const std::string& path);

namespace detail {
extern std::atomic<std::uint32_t> session;  // 0: off
inline thread_local constinit Track t_track{};
void record(std::uint32_t of, const char* name, Track track, Detail detail, std::int64_t begin,
            std::int64_t end) noexcept;
}  // namespace detail

inline bool is_on() { return detail::session.load(std::memory_order_relaxed) != 0; }
/// Nanoseconds on the clock of the timeline.
std::int64_t now();

/// Records the time from its construction to its end. `name` is a string literal, as in trace::Span span("my part").
class Span {
 public:
  explicit Span(const char* name, Track track = kThisThread, Detail detail = {})
      : session_(detail::session.load(std::memory_order_relaxed)) {
    if (session_ == 0) [[likely]]
      return;
    name_ = name;
    track_ = track;
    detail_ = detail;
    begin_ = now();
  }
  ~Span() {
    if (session_ != 0) [[unlikely]]
      detail::record(session_, name_, track_, detail_, begin_, now());
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  std::uint32_t session_;
  const char* name_ = nullptr;
  Track track_ = {};
  Detail detail_ = {};
  std::int64_t begin_ = 0;
};

/// Records a span that is no scope of one thread; `begin` is what now() was, or 0 where it was not recorded then.
inline void span(const char* name, Track track, Detail detail, std::int64_t begin) {
  const std::uint32_t session = detail::session.load(std::memory_order_relaxed);
  if (session != 0 && begin != 0) [[unlikely]]
    detail::record(session, name, track, detail, begin, now());
}
/// Records a moment.
inline void instant(const char* name, Track track = kThisThread, Detail detail = {}) {
  const std::uint32_t session = detail::session.load(std::memory_order_relaxed);
  if (session != 0) [[unlikely]]
    detail::record(session, name, track, detail, now(), -1);
}

/// Until it is destroyed, what the calling thread records without naming a track is on this one.
class TrackScope {
 public:
  explicit TrackScope(Track track) : previous_(detail::t_track) { detail::t_track = track; }
  ~TrackScope() { detail::t_track = previous_; }
  TrackScope(const TrackScope&) = delete;
  TrackScope& operator=(const TrackScope&) = delete;

 private:
  Track previous_;
};

/// A span on a device's track, where spans inside it are too.
class DeviceSpan {
 public:
  DeviceSpan(const char* name, Device device, Detail detail = {})
      : track_(device_track(device)), span_(name, kThisThread, detail) {}

 private:
  TrackScope track_;
  Span span_;
};

/// The rank that the calling thread works for; -1, as in all threads at first: the process's.
inline int rank() { return t_thread_context.traced_rank; }
/// Makes the calling thread work for a rank of its own, until it is destroyed.
class RankScope {
 public:
  explicit RankScope(int rank) : previous_(t_thread_context.traced_rank) { t_thread_context.traced_rank = rank; }
  ~RankScope() { t_thread_context.traced_rank = previous_; }
  RankScope(const RankScope&) = delete;
  RankScope& operator=(const RankScope&) = delete;

 private:
  int previous_;
};

}  // namespace tandem::trace
