// The timeline: what is recorded, by whom, and what stands in the file.
#include <tandem/tensor/trace.h>

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include <nlohmann/json.hpp>

#include "../support/test.h"

using namespace tandem;
using nlohmann::json;

namespace {

class Folder {
 public:
  Folder() : path_(std::filesystem::temp_directory_path() / fmt::format("tandem-trace-test-{}", getpid())) {
    std::filesystem::create_directory(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const char* name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

struct Seen {
  json whole;
  std::map<std::pair<int, std::string>, std::vector<json>> tracks;  // by process and name
  std::map<int, std::string> processes;

  std::vector<json>& on(const std::string& track, int process = 0) { return tracks[{process, track}]; }
  std::string names(const std::string& track, int process = 0) {
    std::string text;
    for (const json& e : on(track, process)) text += (text.empty() ? "" : " ") + e["name"].get<std::string>();
    return text;
  }
};

// What is written now.
Seen written() {
  const Folder folder;
  const std::string path = folder / "trace.json";
  trace::write(path);
  Seen seen;
  std::ifstream(path) >> seen.whole;
  std::map<std::pair<int, int>, std::string> tracks;
  for (const json& e : seen.whole["traceEvents"]) {
    if (e["name"] == "process_name") seen.processes[e["pid"]] = e["args"]["name"];
    if (e["name"] == "thread_name") {
      tracks[{e["pid"], e["tid"]}] = e["args"]["name"];
      seen.on(e["args"]["name"], e["pid"]);
    }
    if (e["ph"] != "M") seen.on(tracks.at({e["pid"], e["tid"]}), e["pid"]).push_back(e);
  }
  return seen;
}

struct Recording {
  explicit Recording(const trace::Options& options = {}) { trace::start(options); }
  ~Recording() { trace::stop(); }
};

double begin_of(const json& e) { return e["ts"]; }
double end_of(const json& e) { return e["ts"].get<double>() + e["dur"].get<double>(); }

}  // namespace

TEST_CASE("nothing is recorded while it is off") {
  { const Recording recording; }
  CHECK(!trace::is_on());
  {
    const trace::Span span("unseen");
    trace::instant("unseen");
    trace::span("unseen", trace::kThisThread, {}, trace::now());
  }
  Seen seen = written();
  CHECK(seen.whole["traceEvents"].empty());
  CHECK(seen.tracks.empty());
}

TEST_CASE("spans nest, and moments and numbers are shown") {
  {
    const Recording recording;
    CHECK(trace::is_on());
    const trace::Span outer("outer", trace::kThisThread, {"rows", 64});
    trace::instant("moment");
    const trace::Span inner("inner");
  }
  Seen seen = written();
  REQUIRE(seen.names("main") == "outer moment inner");
  CHECK(seen.processes == std::map<int, std::string>{{0, "process"}});
  const std::vector<json>& events = seen.on("main");
  CHECK(events[0]["args"] == json{{"rows", 64}});
  CHECK(!events[2].contains("args"));
  CHECK(events[0]["ph"] == "X");
  CHECK(events[1]["ph"] == "i");
  CHECK(begin_of(events[0]) == 0);
  CHECK(begin_of(events[0]) <= begin_of(events[1]));
  CHECK(begin_of(events[1]) <= begin_of(events[2]));
  CHECK(end_of(events[2]) <= end_of(events[0]) + 1e-4);
  CHECK(seen.whole["otherData"]["left_out"] == 0);
}

TEST_CASE("any name is a string of JSON") {
  {
    const Recording recording;
    const trace::Span span("a \"quoted\" \\ name\n\x01 \xff of bytes");
    const trace::Span track("on a track", {"row\t\"x\"", 3});
  }
  Seen seen = written();
  CHECK(seen.names("main") == "a \"quoted\" \\ name\n\x01 \xef\xbf\xbd of bytes");
  CHECK(seen.names("row\t\"x\" 3") == "on a track");
}

TEST_CASE("every thread has a track, and keeps what it has recorded after its end") {
  {
    const Recording recording;
    trace::instant("first");
    for (int i = 0; i < 3; ++i)  // buffers are used again
      std::thread([] { const trace::Span span("short-lived"); }).join();
    std::thread([] {
      const trace::TrackScope worker(trace::loader_track(1));
      const trace::Span span("make");
      {
        const trace::DeviceSpan device("compute", Device("cpu:1"));
        trace::instant("inside");
      }
      trace::instant("elsewhere", trace::bucket_track(0));
    }).join();
  }
  Seen seen = written();
  CHECK(seen.names("main") == "first");
  CHECK(seen.names("thread 2") == "short-lived");
  CHECK(seen.names("thread 4") == "short-lived");
  CHECK(seen.names("loader 1") == "make");
  CHECK(seen.names("cpu:1") == "compute inside");
  CHECK(seen.names("bucket 0") == "elsewhere");
  CHECK(seen.tracks.size() == 7);
}

TEST_CASE("spans of several threads on one track are told apart where they overlap") {
  {
    const Recording recording;
    const trace::Span span("ours", trace::device_track(Device("cpu:0")));
    const std::int64_t begin = trace::now();
    std::thread([begin] {
      trace::span("theirs", trace::device_track(Device("cpu:0")), {}, begin);  // ends before ours: nested
    }).join();
    trace::span("crossing", trace::device_track(Device("cpu:0")), {}, begin - 1'000'000'000);
  }
  Seen seen = written();
  CHECK(seen.names("cpu:0") == "crossing theirs");
  CHECK(seen.names("cpu:0 (2)") == "ours");
}

TEST_CASE("ranks that are threads are processes of the timeline") {
  {
    const Recording recording;
    trace::instant("program");
    for (const int rank : {1, 0})
      std::thread([rank] {
        const trace::RankScope scope(rank);
        CHECK(trace::rank() == rank);
        trace::instant(rank == 0 ? "zero" : "one");
      }).join();
    CHECK(trace::rank() == -1);
  }
  Seen seen = written();
  CHECK(seen.processes == std::map<int, std::string>{{0, "rank 0"}, {1, "rank 1"}, {2, "process"}});
  CHECK(seen.names("main", 0) == "zero");
  CHECK(seen.names("main", 1) == "one");
  CHECK(seen.names("main", 2) == "program");
}

TEST_CASE("what comes after the limit is counted") {
  constexpr int kMore = 5000;  // fills several pieces of memory
  {
    const Recording recording({.events_per_thread = kMore});
    for (int i = 0; i < kMore + 7; ++i) trace::instant("i", trace::kThisThread, {"number", i});
  }
  Seen seen = written();
  std::vector<json>& events = seen.on("main");
  REQUIRE(events.size() == kMore);
  for (int i = 0; i < kMore; ++i) REQUIRE(events[static_cast<std::size_t>(i)]["args"]["number"] == i);
  CHECK(seen.whole["otherData"]["left_out"] == 7);
  CHECK(test::contains(seen.whole.dump(), "7 events left out"));
  {
    const Recording recording;
    trace::instant("anew");
  }
  seen = written();
  CHECK(seen.names("main") == "anew");
  CHECK(seen.whole["otherData"]["left_out"] == 0);
  CHECK(!test::contains(seen.whole.dump(), "left out"));
}

TEST_CASE("the limit is each thread's own, also where its memory was another's") {
  {
    const Recording recording({.events_per_thread = 5});
    for (int i = 0; i < 6; ++i)
      std::thread([i] {
        for (int n = 0; n < 3 + i / 5 * 4; ++n) trace::instant("i");
      }).join();
  }
  Seen seen = written();
  std::size_t count = 0;
  for (const auto& [track, events] : seen.tracks) count += events.size();
  CHECK(count == 5 * 3 + 5);
  CHECK(seen.whole["otherData"]["left_out"] == 2);
}

TEST_CASE("a span belongs to the recording in which it began") {
  {
    trace::start();
    const trace::Span span("stopped meanwhile");
    trace::stop();
  }
  CHECK(written().names("main") == "stopped meanwhile");
  {
    trace::start();
    const trace::Span span("of the first recording");
    trace::stop();
    trace::start();
    trace::start();  // it is on already, and forgets nothing
    trace::instant("of the second");
  }
  trace::stop();
  CHECK(written().names("main") == "of the second");
  {
    const trace::Span span("began before it was on");
    trace::start();
  }
  trace::stop();
  CHECK(written().tracks.empty());
}

TEST_CASE("a file can be written while others record") {
  const Recording recording;
  std::atomic<bool> enough = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i)
    threads.emplace_back([&] {
      for (int n = 0; n < 20'000 && !enough; ++n) const trace::Span span("busy", trace::kThisThread, {"n", n});
    });
  for (int i = 0; i < 3; ++i) {
    Seen seen = written();
    for (const auto& [track, events] : seen.tracks)
      for (std::size_t n = 0; n < events.size(); ++n) REQUIRE(events[n]["args"]["n"] == n);
  }
  enough = true;
  for (std::thread& t : threads) t.join();
}

TEST_CASE("mistakes") {
  CHECK_ERROR(trace::start({.events_per_thread = 0}), "[trace]", "events_per_thread is 0", "give 1 or more");
  CHECK(!trace::is_on());
  CHECK_ERROR(trace::write(""), "[trace]", "the file's name is empty");
  CHECK_ERROR(trace::write("/no/such/folder/trace.json"), "[trace] /no/such/folder/trace.json cannot be written",
              "create the directory first");
}
