#include <tandem/parallel/launch/node_messages.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include <fmt/format.h>

namespace tandem::parallel {
namespace {

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::string to_text(const Failure& f) {
  return fmt::format("{}\n{}\n{}\n{}\n{}", f.what, f.where, f.exit_code, f.final ? 1 : 0,
                     fmt::join(f.last_lines, "\n"));
}

std::string to_text(const Arrival& a) { return fmt::format("{}\n{}\n{}\n{}", a.terms, a.host, a.token, a.nprocs); }

Failure failure_from(const std::string& text) {
  std::vector<std::string> lines = split_lines(text);
  lines.resize(std::max<std::size_t>(lines.size(), 4));
  return {.what = lines[0],
          .where = lines[1],
          .exit_code = std::max(1, std::atoi(lines[2].c_str())),
          .final = lines[3] == "1",
          .last_lines = {lines.begin() + 4, lines.end()}};
}

Arrival arrival_from(const std::string& text) {
  std::vector<std::string> lines = split_lines(text);
  lines.resize(4);
  return {.terms = lines[0], .host = lines[1], .token = lines[2], .nprocs = std::atoi(lines[3].c_str())};
}

}  // namespace tandem::parallel
