// Events as JSON, in the Chrome trace-event format.
#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <tandem/tensor/io/atomic_file.h>
#include <tandem/tensor/trace_events.h>

namespace tandem::trace {
namespace {

// A string in quotes. Bytes that are no UTF-8 are replaced.
std::string json_text(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Names are literals: each is made once.
class Names {
 public:
  const std::string& operator()(const char* name) {
    std::string& text = texts_[name];
    if (text.empty()) text = json_text(name);
    return text;
  }

 private:
  std::unordered_map<const char*, std::string> texts_;
};

// Where a track stands among the others, and what it is called.
using Place = std::tuple<std::size_t, int, std::string>;

class Tracks {
 public:
  // The events' threads get their numbers in the order in which they recorded first.
  explicit Tracks(std::span<const Event> events) {
    for (const Event& e : events)
      if (e.kind == kThreads) threads_.emplace(e.number, 0);
    int next = 0;
    for (auto& thread : threads_) thread.second = ++next;
  }
  Place place_of(const char* kind, int number) const {
    if (kind == kThreads) {
      const int n = threads_.at(number);
      return {0, n, n == 1 ? "main" : fmt::format("thread {}", n)};
    }
    constexpr std::array<std::string_view, 6> kOrder = {"cpu:",          "cuda:",    "loader",
                                                        "communication", "messages", "bucket"};
    const std::string_view text = kind;
    const auto at = static_cast<std::size_t>(std::find(kOrder.begin(), kOrder.end(), text) - kOrder.begin());
    const char* space = text.ends_with(':') ? "" : " ";
    return {1 + at, number, number < 0 ? std::string(text) : fmt::format("{}{}{}", text, space, number)};
  }

 private:
  std::map<int, int> threads_;
};

std::int64_t end_of(const Event& e) { return std::max(e.begin, e.end); }

// Whether spans, given in order of their beginnings, lie one after the other or one in the other.
class Lane {
 public:
  std::vector<const Event*> events;
  bool take(const Event& e) {
    if (e.end >= 0) {
      while (!open_.empty() && open_.back() <= e.begin) open_.pop_back();
      if (!open_.empty() && open_.back() < e.end) return false;
      open_.push_back(e.end);
    }
    events.push_back(&e);
    return true;
  }

 private:
  std::vector<std::int64_t> open_;  // ends of the spans around this moment
};

std::vector<Lane> lanes_of(std::vector<const Event*>& events) {
  std::stable_sort(events.begin(), events.end(), [](const Event* a, const Event* b) {
    return a->begin != b->begin ? a->begin < b->begin : end_of(*a) > end_of(*b);
  });
  std::vector<Lane> lanes(1);
  for (const Event* e : events) {
    std::size_t i = 0;
    while (!lanes[i].take(*e))
      if (++i == lanes.size()) lanes.emplace_back();
  }
  return lanes;
}

class Writer {
 public:
  explicit Writer(const Process& process) : process_(process) {
    about_process("process_name", "name", json_text(process.name));
    about_process("process_sort_index", "sort_index", std::to_string(process.id));
    if (process.left_out > 0)
      about_process("process_labels", "labels",
                    json_text(fmt::format("{} events left out: a thread's limit was reached", process.left_out)));
  }
  void lane(const std::string& name, const Lane& lane) {
    ++track_;
    about_track("thread_name", "name", json_text(name));
    about_track("thread_sort_index", "sort_index", std::to_string(track_));
    for (const Event* e : lane.events) event(*e);
  }
  std::string text() { return std::move(text_); }

 private:
  template <class... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Args>(args)...);
  }
  void about_process(const char* what, const char* key, const std::string& value) {
    add(R"(,{}{{"name":"{}","ph":"M","pid":{},"args":{{"{}":{}}}}})", '\n', what, process_.id, key, value);
  }
  void about_track(const char* what, const char* key, const std::string& value) {
    add(R"(,{}{{"name":"{}","ph":"M","pid":{},"tid":{},"args":{{"{}":{}}}}})", '\n', what, process_.id, track_, key,
        value);
  }
  // Microseconds, as the format wants them, with all digits.
  void time(const char* key, std::int64_t ns) {
    const std::int64_t size = std::abs(ns);
    add(R"(,"{}":{}{}.{:03})", key, ns < 0 ? "-" : "", size / 1000, size % 1000);
  }
  void event(const Event& e) {
    add(R"(,{}{{"name":{},"ph":"{}","pid":{},"tid":{})", '\n', names_(e.name), e.end < 0 ? "i" : "X", process_.id,
        track_);
    time("ts", e.begin - process_.zero);
    if (e.end < 0)
      add(R"(,"s":"t")");
    else
      time("dur", e.end - e.begin);
    if (e.detail.name != nullptr) add(R"(,"args":{{{}:{}}})", names_(e.detail.name), e.detail.value);
    text_ += '}';
  }

  const Process& process_;
  Names names_;
  int track_ = 0;
  std::string text_;
};

}  // namespace

std::string text_of(std::span<const Event> events, const Process& process) {
  const Tracks tracks(events);
  std::map<std::pair<const char*, int>, std::vector<const Event*>> recorded;
  for (const Event& e : events) recorded[{e.kind, e.number}].push_back(&e);
  std::map<Place, std::vector<const Event*>> shown;  // one text may have several addresses
  for (const auto& [track, list] : recorded) {
    auto& all = shown[tracks.place_of(track.first, track.second)];
    all.insert(all.end(), list.begin(), list.end());
  }
  Writer writer(process);
  for (auto& [place, list] : shown) {
    const std::vector<Lane> lanes = lanes_of(list);
    for (std::size_t i = 0; i < lanes.size(); ++i)
      writer.lane(i == 0 ? std::get<2>(place) : fmt::format("{} ({})", std::get<2>(place), i + 1), lanes[i]);
  }
  return writer.text();
}

std::int64_t first_moment(std::span<const Event> events) {
  const auto first =
      std::min_element(events.begin(), events.end(), [](const Event& a, const Event& b) { return a.begin < b.begin; });
  return first == events.end() ? 0 : first->begin;
}

void write_file(const std::string& path, std::span<const std::string> texts, const std::string& about) {
  AtomicFile file(path, "trace");
  const auto add = [&](std::string_view text) { file.write(text.data(), text.size()); };
  add(R"({"displayTimeUnit":"ms","otherData":)");
  add(about);
  add(",\"traceEvents\":[");
  bool first = true;
  for (const std::string& text : texts) {
    if (text.empty()) continue;
    add(std::string_view(text).substr(std::exchange(first, false) ? 1 : 0));  // no comma before the first
  }
  add("\n]}\n");
  file.commit();
}

void write(const std::string& path) {
  const Recording recording = collect();
  std::map<int, std::vector<Event>> by_rank;
  for (const Event& e : recording.events) by_rank[e.rank].push_back(e);
  const std::int64_t zero = first_moment(recording.events);
  std::int64_t left_out = 0;
  for (const auto& [rank, count] : recording.left_out) {
    by_rank[rank];
    left_out += count;
  }
  std::vector<std::string> texts;
  for (const auto& [rank, events] : by_rank) {
    // Threads that are no rank stand after those that are.
    const bool own = rank >= 0;
    const auto lost = recording.left_out.find(rank);
    const Process process{.id = own ? rank : std::max(0, by_rank.rbegin()->first + 1),
                          .name = own ? fmt::format("rank {}", rank) : "process",
                          .zero = zero,
                          .left_out = lost == recording.left_out.end() ? 0 : lost->second};
    texts.push_back(text_of(events, process));
  }
  write_file(path, texts, nlohmann::json{{"left_out", left_out}}.dump());
}

}  // namespace tandem::trace
