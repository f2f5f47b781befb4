#include "turns.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>

#include <tandem/tandem.h>

#include "timing.h"

using namespace tandem;

namespace bench {

double Turn::typical(const std::string& what) const { return mean_of_middle(samples.at(what)); }

void take_turns(std::vector<Turn>& turns, int rounds, double round_ms) {
  const int rank = parallel::rank();
  auto run = [&](Turn& turn, int calls) {
    parallel::barrier();
    return rank < turn.ranks ? turn.run(calls) : Phases();
  };
  for (Turn& turn : turns) {
    constexpr int kTried = 10;
    (void)run(turn, kTried);
    parallel::barrier();
    const Phases tried = mean_of(1, [&] { (void)run(turn, kTried); });
    const double wanted = round_ms * 1000 * kTried / tried.at("whole") / turn.multiple;
    Tensor calls = tensor({static_cast<std::int64_t>(std::clamp(wanted, 1.0, 1e5)) * turn.multiple});
    parallel::broadcast(calls, 0);
    turn.calls = calls.item<int>();
  }
  std::vector<std::size_t> order(turns.size());
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 generator;  // the same on all ranks
  for (int round = 0; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), generator);
    for (const std::size_t k : order) {
      Turn& turn = turns[k];
      (void)run(turn, std::max(1, turn.calls / 8));  // brings its data back into the caches
      for (const auto& [what, microseconds] : run(turn, turn.calls)) turn.samples[what].push_back(microseconds);
    }
  }
  parallel::barrier();
}

Phases mean_of(int calls, const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) body();
  return {
      {"whole", std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / calls}};
}

}  // namespace bench
