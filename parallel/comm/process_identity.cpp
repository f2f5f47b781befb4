#include <tandem/parallel/comm/process_identity.h>

#include <charconv>
#include <fstream>
#include <iterator>
#include <sstream>

#include <fmt/format.h>

namespace tandem::parallel {

std::string identity_of(pid_t process) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t name_end = text.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return {};
  std::istringstream fields(text.substr(name_end + 1));
  constexpr int kState = 3, kStart = 22;  // as proc(5) counts
  std::string field, state;
  for (int i = kState; i <= kStart; ++i) {
    fields >> field;
    if (i == kState) state = field;
  }
  const bool ended = state == "Z" || state == "X" || !fields;
  return ended ? std::string() : fmt::format("{} {}", process, field);
}

bool is_running(const std::string& identity) {
  pid_t process = -1;
  std::from_chars(identity.data(), identity.data() + identity.size(), process);
  return process > 0 && identity_of(process) == identity;
}

}  // namespace tandem::parallel
