// Timing for the benchmarks: several sides in turn within each round, so that a drifting machine is fair to all.
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include <fmt/core.h>

namespace bench {

/// The q-quantile of the values, 0 <= q <= 1.
inline double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const double at = q * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - std::floor(at)) * (values[high] - values[low]);
}
inline double median(const std::vector<double>& values) { return quantile(values, 0.5); }
/// The mean without the smallest and the largest tenth. Under a load that comes and goes the median is the time with it
/// or without it; such means follow the share of the time in which it is there, and those of parts add up.
inline double mean_of_middle(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto out = static_cast<std::ptrdiff_t>(values.size() / 10);
  const auto begin = values.begin() + out, end = values.end() - out;
  return std::accumulate(begin, end, 0.0) / static_cast<double>(end - begin);
}
/// Median of a[i] / b[i].
inline double median_ratio(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < a.size(); ++i) ratios.push_back(a[i] / b[i]);
  return median(ratios);
}

/// Microseconds a call of each side, in each of `rounds` rounds; each side runs for about `round_ms` a round. The sides
/// take turns, and the first to run changes from round to round.
inline std::vector<std::vector<double>> time_rounds(const std::vector<std::function<void()>>& sides, int rounds,
                                                    double round_ms) {
  using Clock = std::chrono::steady_clock;
  auto microseconds = [](Clock::duration d) { return std::chrono::duration<double, std::micro>(d).count(); };
  std::vector<int> calls;
  for (const auto& side : sides) {
    for (int i = 0; i < 5; ++i) side();
    const auto start = Clock::now();
    int n = 0;
    while (microseconds(Clock::now() - start) < round_ms * 500) {
      side();
      ++n;
    }
    calls.push_back(std::max(1, 2 * n));
  }
  std::vector<std::vector<double>> times(sides.size());
  for (int round = 0; round < rounds; ++round)
    for (std::size_t k = 0; k < sides.size(); ++k) {
      const std::size_t s = (k + static_cast<std::size_t>(round)) % sides.size();
      sides[s]();  // brings its data back into the caches
      const auto start = Clock::now();
      for (int i = 0; i < calls[s]; ++i) sides[s]();
      times[s].push_back(microseconds(Clock::now() - start) / calls[s]);
    }
  return times;
}

inline bool write_json(const std::string& path, const std::string& text) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  const bool ok = file != nullptr && std::fputs((text + "\n").c_str(), file) >= 0 && std::fclose(file) == 0;
  if (!ok) fmt::print(stderr, "{} cannot be written\n", path);
  return ok;
}

}  // namespace bench
