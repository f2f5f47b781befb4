#include <tandem/tensor/random.h>

#include <array>
#include <atomic>

#include <tandem/tensor/error.h>
#include <tandem/tensor/thread_context.h>

namespace tandem {
namespace {

struct Streams {
  std::atomic<std::uint64_t> seed{0};
  std::array<std::atomic<std::uint64_t>, kMaxStreams> positions{};
};
Streams& streams() {
  static Streams s;
  return s;
}
// Not in ThreadContext, which is carried into other threads: these would draw from the one key at the same time.
thread_local PhiloxKey* t_scope = nullptr;

PhiloxKey draw_from(std::size_t stream, std::uint64_t blocks) {
  return {streams().seed, stream, streams().positions[stream].fetch_add(blocks)};
}

}  // namespace

void manual_seed(std::uint64_t seed) { set_random_state({seed, {}}); }

RandomState random_state() {
  RandomState state{streams().seed, {}};
  std::size_t used = kMaxStreams;
  while (used > 0 && streams().positions[used - 1] == 0) --used;
  for (std::size_t i = 0; i < used; ++i) state.positions.push_back(streams().positions[i]);
  return state;
}

void set_random_state(const RandomState& state) {
  check(state.positions.size() <= kMaxStreams, "set_random_state", "has {} streams; at most {} are supported",
        state.positions.size(), kMaxStreams);
  streams().seed = state.seed;
  for (std::size_t i = 0; i < kMaxStreams; ++i)
    streams().positions[i] = i < state.positions.size() ? state.positions[i] : 0;
}

PhiloxKey draw(std::uint64_t blocks) {
  if (t_scope != nullptr) {
    const PhiloxKey start = *t_scope;
    t_scope->block += blocks;
    return start;
  }
  return draw_from(static_cast<std::size_t>(t_thread_context.random_stream), blocks);
}

UniqueFunction<PhiloxKey()> repeat_draw(const PhiloxKey& drawn, std::uint64_t blocks) {
  check(t_scope == nullptr, "random",
        "numbers that are drawn in a RandomScope, as reproducible_shards does, cannot be captured in a graph; run this "
        "step without a graph");
  const auto stream = static_cast<std::size_t>(drawn.stream);
  streams().positions[stream].fetch_sub(blocks);
  return [stream, blocks] { return draw_from(stream, blocks); };
}

RandomStream::RandomStream(int stream) : previous_(t_thread_context.random_stream) {
  check(stream >= 0 && stream < kMaxStreams, "RandomStream", "stream {} is out of range; give 0 to {}", stream,
        kMaxStreams - 1);
  t_thread_context.random_stream = stream;
}
RandomStream::~RandomStream() { t_thread_context.random_stream = previous_; }
int RandomStream::current() { return t_thread_context.random_stream; }

RandomScope::RandomScope(const PhiloxKey& start) : key_(start), previous_(t_scope) { t_scope = &key_; }
RandomScope::~RandomScope() { t_scope = previous_; }
PhiloxKey* RandomScope::current() { return t_scope; }

}  // namespace tandem
