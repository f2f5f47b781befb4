#include "prediction.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include <fmt/core.h>

namespace bench {

double at(const Curve& curve, double size) {
  if (curve.size() == 1) return curve.begin()->second;
  auto above = curve.lower_bound(size);
  if (above == curve.begin()) ++above;
  if (above == curve.end()) --above;
  const auto below = std::prev(above);
  const double slope = (above->second - below->second) / (above->first - below->first);
  return below->second + slope * (size - below->first);
}

bool works_beside(const std::string& backend) { return backend != "shm" && backend != "thread"; }

Prediction predict(const Pieces& pieces, const Candidate& candidate, double rows) {
  const int n = candidate.devices;
  Prediction p{.candidate = candidate};
  p.compute = at(pieces.compute, std::ceil(rows / n));  // the largest part is the one that is waited for
  p.update = candidate.mode == Mode::dp ? pieces.update / n : pieces.update;
  if (n > 1)
    p.waiting = (p.compute + p.update) * ((candidate.mode == Mode::dp ? pieces.dp_slowdown : pieces.ddp_slowdown) - 1);
  if (candidate.mode == Mode::dp) {
    p.exchange = pieces.dp_sum;
    p.wrapper = pieces.dp_wrapper;
  }
  if (candidate.mode == Mode::ddp) {
    // The last bucket is launched when backward has ended, and hides behind nothing.
    std::vector<double> times;
    for (const double bytes : candidate.bucket_bytes) times.push_back(at(pieces.all_reduce, bytes));
    p.exchange = std::accumulate(times.begin(), times.end(), 0.0);
    const double early = times.empty() ? 0 : p.exchange - times.back();
    p.exchange -= std::min(early * pieces.hidden_share, p.compute);
    p.wrapper = pieces.ddp_wrapper;
  }
  return p;
}

std::string what_limits(const Prediction& p, const Prediction& one) {
  const int n = p.candidate.devices;
  if (n == 1) return "the base of the comparison";
  if (one.step() / p.step() >= 0.93 * n) return "hardly anything";
  const std::pair<double, const char*> lost[] = {
      {p.compute - one.compute / n, "small parts: fixed costs of a part, and products that are slower on few rows"},
      {p.waiting, "waiting for the slowest, and memory that the cores share"},
      {p.update - one.update / n, "every rank updates all weights"},
      {p.exchange, p.candidate.mode == Mode::dp ? "the sum of the gradients" : "the all-reduce"},
      {p.wrapper, "fixed costs of the wrapper"}};
  const auto most = std::max_element(std::begin(lost), std::end(lost),
                                     [](const auto& a, const auto& b) { return a.first < b.first; });
  return fmt::format("{} ({:.0f} us)", most->second, most->first);
}

std::string describe(const Candidate& c) {
  if (c.mode == Mode::dp) return fmt::format("DataParallel on {} devices", c.devices);
  if (c.mode == Mode::ddp)
    return fmt::format("DistributedDataParallel on {} ranks, buckets of {} MiB", c.devices, c.bucket_mb);
  return "one device";
}

std::size_t best_of(const std::vector<Prediction>& predictions, double margin) {
  const auto fastest = std::min_element(predictions.begin(), predictions.end(),
                                        [](const auto& a, const auto& b) { return a.step() < b.step(); });
  const auto near = std::find_if(predictions.begin(), predictions.end(),
                                 [&](const Prediction& p) { return p.step() <= fastest->step() * (1 + margin); });
  return static_cast<std::size_t>(near - predictions.begin());
}

}  // namespace bench
