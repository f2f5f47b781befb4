// What trace points have recorded, and its text: for those who write it to a file.
#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <tandem/tensor/trace.h>

namespace tandem::trace {

/// A span, or an instant where `end` is -1.
struct Event {
  const char* name;
  const char* kind;  // of its track; kThreads: that of a thread
  std::int32_t number, rank;
  Detail detail;
  std::int64_t begin, end;
};
inline constexpr const char kThreads[] = "thread";

/// All that has been recorded since the last start.
struct Recording {
  std::vector<Event> events = {};
  std::map<int, std::int64_t> left_out = {};  // by rank: events that came after a thread's limit
};
Recording collect();

/// What the events of a process, or of a rank, are shown under.
struct Process {
  int id = 0;
  std::string name = {};
  std::int64_t zero = 0;  // what its clock shows at the beginning of the timeline
  std::int64_t left_out = 0;
};
/// The events in the Chrome trace-event format: objects, with ",\n" before each. Events that are on one track and
/// overlap without being nested get tracks "... (2)", "... (3)" of their own.
std::string text_of(std::span<const Event> events, const Process& process);
/// Writes texts of processes as one file; `about` is a JSON object that says more.
void write_file(const std::string& path, std::span<const std::string> texts, const std::string& about);
/// The first moment in the events; 0 where there are none.
std::int64_t first_moment(std::span<const Event> events);

}  // namespace tandem::trace
