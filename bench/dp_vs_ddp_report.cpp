#include "dp_vs_ddp_report.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <fstream>

#include <tandem/tensor/error.h>

#include "timing.h"

namespace bench {
namespace {

double sum_of(const Phases& phases, std::initializer_list<const char*> names) {
  double total = 0;
  for (const char* name : names)
    if (const auto found = phases.find(name); found != phases.end()) total += found->second;
  return total;
}

// 1234567 as "1.23 MB".
std::string megabytes(double bytes) { return fmt::format("{:.2f} MB", bytes / 1e6); }

}  // namespace

void print_header(int layers, std::int64_t width) {
  fmt::print("MLP with {} hidden layer{} of {}; times in us a step, percentiles in brackets\n", layers,
             layers == 1 ? "" : "s", width);
  fmt::print("{:>5} {:>5} {:>8} {:>2} {:>24} {:>10} {:>9} {:>10} {:>10}\n", "batch", "", "mode", "n", "step [p10, p90]",
             "samples/s", "speed-up", "efficiency", "memory");
  std::fflush(stdout);
}

void print_row(const nlohmann::json& r) {
  auto number = [&](const char* key) { return r[key].get<double>(); };
  fmt::print("{:>5} {:>5} {:>8} {:>2} {:>24} {:>10.0f} {:>9.2f} {:>9.0f}% {:>10}\n", r["batch_size"].get<int>(),
             r["optimizer"].get<std::string>(), r["mode"].get<std::string>(), r["devices"].get<int>(),
             fmt::format("{:.0f} [{:.0f}, {:.0f}]", number("median_us"), number("p10_us"), number("p90_us")),
             number("samples_per_s"), number("speed_up"), 100 * number("efficiency"), megabytes(number("peak_bytes")));
  std::string phases;
  for (const char* name : {"scatter", "replicate", "forward", "gather", "loss", "backward", "reduce", "communication",
                           "overlap", "wait", "step"})
    if (r["phases_us"].contains(name))
      phases += fmt::format("{}{} {:.0f}", phases.empty() ? "" : ", ", name, r["phases_us"][name].get<double>());
  if (number("moved_bytes") > 0) phases += fmt::format("; {} moved", megabytes(number("moved_bytes")));
  fmt::print("      {}\n      {}\n", phases, r["limited_by"].get<std::string>());
  std::fflush(stdout);
}

std::string what_limits(Mode mode, int n, double speed_up, const Phases& phases, const Phases& one) {
  if (mode == Mode::one) return "The base of the comparison.";
  const double whole = sum_of(phases, {"whole"});
  const double compute = sum_of(phases, {"forward", "loss", "backward"}) - sum_of(one, {"forward", "backward"}) / n;
  const double step = sum_of(phases, {"step"}) - sum_of(one, {"step"}) / n;
  const double communication = sum_of(phases, {"scatter", "replicate", "gather", "reduce", "wait"});
  const std::string gain = speed_up < 1 ? "No gain at this size: " : "";
  if (n == 1)
    return fmt::format("One device: {:.0f} us of {:.0f} are what the wrapper adds.",
                       std::max(0.0, whole - sum_of(one, {"whole"})), whole);
  if (speed_up / n >= 0.93) return fmt::format("Hardly anything limits it: {:.0f} % of the ideal.", 100 * speed_up / n);
  std::string reason;
  if (compute >= step && compute >= communication)
    reason = fmt::format(
        "the products of {} {} take {:.0f} us more than {} of the whole batch's, by fixed costs and by "
        "memory that the cores share.",
        n, mode == Mode::threads ? "threads" : "small parts", compute, n == 2 ? "half" : fmt::format("1/{}", n));
  else if (communication >= step && mode == Mode::ddp)
    reason = fmt::format("{:.0f} of {:.0f} us go into the all-reduce and into waiting for the slowest rank.",
                         communication, whole);
  else if (communication >= step)
    reason = fmt::format("{:.0f} of {:.0f} us go into moving data and summing the gradients of the replicas.",
                         communication, whole);
  else if (mode == Mode::ddp)
    reason = fmt::format("every rank updates all weights, {:.0f} of {:.0f} us that are not divided.",
                         sum_of(phases, {"step"}), whole);
  else
    reason = fmt::format("the update of the weights takes {:.0f} of {:.0f} us, by memory that the cores share.",
                         sum_of(phases, {"step"}), whole);
  if (gain.empty()) reason[0] = static_cast<char>(std::toupper(reason[0]));
  return gain + reason;
}

void append_records(const std::string& path, const nlohmann::json& records) {
  nlohmann::json all = nlohmann::json::array();
  if (std::ifstream file(path); file) all = nlohmann::json::parse(file, nullptr, false);
  tandem::check(all.is_array(), "dp_vs_ddp", "{} is not a list of records any more; somebody else wrote to it", path);
  for (const nlohmann::json& record : records) all.push_back(record);
  tandem::check(write_json(path, all.dump(1)), "dp_vs_ddp", "{} cannot be written", path);
}

}  // namespace bench
