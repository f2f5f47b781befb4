#include <tandem/parallel/trace.h>

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>

#include <fmt/format.h>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/on_rank_0.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/trace_events.h>

namespace tandem::parallel {
namespace {

using Numbers = std::vector<std::int64_t>;

// One number of each rank, on all ranks.
Numbers all_of(std::int64_t mine, ProcessGroup& group) {
  Tensor all = zeros({group.size()}, {.dtype = int64});
  group.all_gather(all, tensor(std::vector{mine})).wait();
  return all.to_vector<std::int64_t>();
}

// Processes with the same number read the same clock. A time namespace has one of its own.
std::int64_t clock_identity() {
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  char space[64] = {};
  if (readlink("/proc/self/ns/time", space, sizeof space - 1) > 0) text += space;
  return static_cast<std::int64_t>(std::hash<std::string>()(text));
}

// A message of one number between two ranks.
std::int64_t receive(int from, ProcessGroup& group) {
  Tensor t = zeros({1}, {.dtype = int64});
  group.recv(t, from).wait();
  return t.item<std::int64_t>();
}
void send(std::int64_t number, int to, ProcessGroup& group) { group.send(tensor(std::vector{number}), to).wait(); }

struct ClockOffset {
  std::int64_t ahead = 0;       // of rank 0's, in nanoseconds
  std::int64_t round_trip = 0;  // of the messages that told it; 0 where the two are one clock
};

// How far rank `other`'s clock is ahead of rank 0's, on rank 0: the round trip that was shortest leaves least room.
ClockOffset compare_clocks(int other, ProcessGroup& group) {
  constexpr int kRoundTrips = 40;
  ClockOffset best;
  for (int i = 0; i < kRoundTrips; ++i) {
    if (group.rank() == other) {
      (void)receive(0, group);
      send(trace::now(), 0, group);
      continue;
    }
    const std::int64_t begin = trace::now();
    send(0, other, group);
    const std::int64_t there = receive(other, group), end = trace::now();
    if (i > 0 && end - begin >= best.round_trip) continue;
    best = {.ahead = there - (begin + (end - begin) / 2), .round_trip = end - begin};
  }
  return best;
}

// Of every rank, on all ranks.
std::vector<ClockOffset> clocks_of(ProcessGroup& group) {
  std::vector<ClockOffset> clocks(static_cast<std::size_t>(group.size()));
  const Numbers identities = all_of(clock_identity(), group);
  for (std::size_t r = 1; r < clocks.size(); ++r) {
    const int other = static_cast<int>(r);
    if (identities[r] != identities[0] && (group.rank() == 0 || group.rank() == other))
      clocks[r] = compare_clocks(other, group);
  }
  Numbers told;
  for (const ClockOffset& c : clocks) told.insert(told.end(), {c.ahead, c.round_trip});
  Tensor of_rank_0 = tensor(told);
  group.broadcast(of_rank_0, 0).wait();
  told = of_rank_0.to_vector<std::int64_t>();
  for (std::size_t r = 0; r < clocks.size(); ++r) clocks[r] = {.ahead = told[2 * r], .round_trip = told[2 * r + 1]};
  return clocks;
}

// The texts of all ranks, on rank 0.
std::vector<std::string> texts_on_rank_0(std::string mine, ProcessGroup& group) {
  constexpr std::int64_t kPiece = 16 << 20;  // bytes a message
  const Numbers sizes = all_of(static_cast<std::int64_t>(mine.size()), group);
  const auto pieces = [&](std::int64_t bytes, const auto& body) {
    for (std::int64_t at = 0; at < bytes; at += kPiece) body(at, std::min(kPiece, bytes - at));
  };
  std::vector<std::string> texts;
  if (group.rank() != 0) {
    pieces(sizes[static_cast<std::size_t>(group.rank())], [&](std::int64_t at, std::int64_t count) {
      Tensor piece = empty({count}, {.dtype = uint8});
      std::memcpy(piece.data<std::uint8_t>(), mine.data() + at, static_cast<std::size_t>(count));
      group.send(piece, 0).wait();
    });
    return texts;
  }
  texts.push_back(std::move(mine));
  for (int r = 1; r < group.size(); ++r) {
    std::string& text = texts.emplace_back(static_cast<std::size_t>(sizes[static_cast<std::size_t>(r)]), '\0');
    pieces(sizes[static_cast<std::size_t>(r)], [&](std::int64_t at, std::int64_t count) {
      Tensor piece = empty({count}, {.dtype = uint8});
      group.recv(piece, r).wait();
      std::memcpy(text.data() + at, piece.data<std::uint8_t>(), static_cast<std::size_t>(count));
    });
  }
  return texts;
}

}  // namespace

void write_trace(const std::string& path, const std::shared_ptr<ProcessGroup>& given) {
  if (!given && !is_initialized() && world_size() == 1) return trace::write(path);
  ProcessGroup& group = given ? *given : *default_group();
  check(group.rank() >= 0, "write_trace", "this process is not a member of the group; only its members write");
  trace::Recording recording = trace::collect();
  // Ranks that are threads share one recording.
  const auto of_others = [](int rank) { return t_thread_rank != nullptr && rank != t_thread_rank->rank; };
  std::erase_if(recording.events, [&](const trace::Event& e) { return of_others(e.rank); });
  std::int64_t own_left_out = 0;
  for (const auto& [rank, count] : recording.left_out)
    if (!of_others(rank)) own_left_out += count;
  const auto me = static_cast<std::size_t>(group.rank());
  const std::vector<ClockOffset> clocks = clocks_of(group);
  const Numbers left_out = all_of(own_left_out, group);
  // The timeline begins with the first event of all.
  const std::int64_t none = std::numeric_limits<std::int64_t>::max();
  const Numbers starts =
      all_of(recording.events.empty() ? none : trace::first_moment(recording.events) - clocks[me].ahead, group);
  const std::int64_t zero = *std::min_element(starts.begin(), starts.end());
  const trace::Process process{.id = group.rank(),
                               .name = fmt::format("rank {} of {}", group.rank(), group.size()),
                               .zero = zero == none ? 0 : zero + clocks[me].ahead,
                               .left_out = own_left_out};
  const std::vector<std::string> texts = texts_on_rank_0(trace::text_of(recording.events, process), group);
  std::vector<std::string> ranks;
  for (std::size_t r = 0; r < clocks.size(); ++r)
    ranks.push_back(fmt::format(R"({{"rank":{},"clock_ahead_ns":{},"clock_round_trip_ns":{},"left_out":{}}})", r,
                                clocks[r].ahead, clocks[r].round_trip, left_out[r]));
  const std::string about = fmt::format(R"({{"ranks":[{}]}})", fmt::join(ranks, ","));
  on_rank_0([&] { trace::write_file(path, texts, about); }, group);
}

}  // namespace tandem::parallel
