#include <tandem/tensor/fault.h>

#include <unistd.h>

#include <array>
#include <atomic>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <tandem/tensor/error.h>

namespace tandem::fault {
namespace {

constexpr std::array kActions = {"kill", "stop", "exit", "throw", "delay"};
enum class Action { kill, stop, exit, throw_error, delay };
constexpr std::array kPoints = {"start", "init", "group", "step", "backward", "collective", "save"};

struct Fault {
  std::string text;
  Action action = Action::kill;
  std::optional<Point> point = {};
  std::optional<int> rank = {}, code = {};
  std::optional<double> seconds = {};
  std::int64_t time = 1;            // the point is reached for the time-th time
  std::optional<int> restart = {};  // of the job's starts, counted from 0
};

[[noreturn]] void refuse(std::string_view text, std::string_view why) {
  fail("TANDEM_FAULT",
       "'{}': {}; write ACTION rank=R POINT, with ; between several. ACTION is kill, stop, exit code=C (default 0), "
       "throw, or delay seconds=S. POINT is start, init, group, step=N, backward=N, collective=N or save=N, N counted "
       "from 1. restart=K, where the launcher starts the job again, means the K-th of these starts (default 0: the "
       "first start)",
       text, why);
}

template <class Number>
Number number(std::string_view text, std::string_view word, std::string_view digits, Number least, Number most) {
  Number value{};
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size() || !(value >= least && value <= most))
    refuse(text, fmt::format("'{}' needs a number from {} to {}", word, least, most));
  return value;
}

// The next part of `rest`, without the spaces around it.
std::string_view take(std::string_view& rest, char separator) {
  const std::size_t end = std::min(rest.find(separator), rest.size());
  std::string_view part = rest.substr(0, end);
  rest.remove_prefix(std::min(end + 1, rest.size()));
  while (part.starts_with(' ')) part.remove_prefix(1);
  while (part.ends_with(' ')) part.remove_suffix(1);
  return part;
}

template <class Names>
std::optional<int> find(const Names& names, std::string_view name) {
  for (std::size_t i = 0; i < names.size(); ++i)
    if (name == names[i]) return static_cast<int>(i);
  return std::nullopt;
}

void read_word(Fault& f, std::string_view word) {
  std::string_view value = word;
  const std::string_view key = take(value, '=');
  const auto whole = [&](auto least, auto most) { return number(f.text, word, value, least, most); };
  const auto once = [&](auto& setting, auto given) {
    if (setting) refuse(f.text, fmt::format("it has two words '{}='", key));
    setting = given;
  };
  if (const std::optional<int> point = find(kPoints, key)) {
    if (f.point) refuse(f.text, "it has two points");
    f.point = static_cast<Point>(*point);
    const bool again = *f.point >= Point::step;
    if (again != (word != key)) refuse(f.text, fmt::format("write '{}{}'", key, again ? "=N" : ""));
    if (again) f.time = whole(std::int64_t{1}, std::numeric_limits<std::int64_t>::max());
  } else if (key == "rank") {
    once(f.rank, whole(0, std::numeric_limits<int>::max()));
  } else if (key == "restart") {
    once(f.restart, whole(0, std::numeric_limits<int>::max()));
  } else if (key == "code" && f.action == Action::exit) {
    once(f.code, whole(0, 255));
  } else if (key == "seconds" && f.action == Action::delay) {
    once(f.seconds, whole(0.0, 1e6));
  } else {
    refuse(f.text, fmt::format("'{}' means nothing here", word));
  }
}

std::vector<Fault> read_faults() {
  std::vector<Fault> faults;
  const char* variable = std::getenv("TANDEM_FAULT");
  for (std::string_view all = variable; !all.empty();) {
    std::string_view rest = take(all, ';');
    if (rest.empty()) continue;
    Fault& f = faults.emplace_back(Fault{.text = std::string(rest)});
    const std::string_view name = take(rest, ' ');
    const std::optional<int> action = find(kActions, name);
    if (!action) refuse(f.text, fmt::format("there is no action '{}'", name));
    f.action = static_cast<Action>(*action);
    while (!rest.empty())
      if (const std::string_view word = take(rest, ' '); !word.empty()) read_word(f, word);
    if (!f.rank) refuse(f.text, "it names no rank");
    if (!f.point) refuse(f.text, "it names no point");
    if (f.action == Action::delay && !f.seconds) refuse(f.text, "it does not say how many seconds");
  }
  if (faults.empty()) refuse(variable, "it names no fault");
  return faults;
}

int number_of(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? 0 : std::atoi(text);
}

std::atomic<int> rank_of_process = -1;
thread_local int t_rank = -1;

// Whatever happens next, who looks at the output shall know why.
void announce(const Fault& f) {
  const std::string line = fmt::format("tandem: fault injected: {}\n", f.text);
  (void)!write(STDERR_FILENO, line.data(), line.size());
}

void act(const Fault& f) {
  if (f.action == Action::throw_error) fail("TANDEM_FAULT", "fault injected: {}", f.text);
  announce(f);
  if (f.action == Action::kill) ::kill(getpid(), SIGKILL);
  if (f.action == Action::stop) ::kill(getpid(), SIGSTOP);
  if (f.action == Action::exit) _exit(f.code.value_or(0));
  if (f.action == Action::delay) std::this_thread::sleep_for(std::chrono::duration<double>(*f.seconds));
}

}  // namespace

const bool wanted = std::getenv("TANDEM_FAULT") != nullptr && *std::getenv("TANDEM_FAULT") != '\0';

void reach(Point point) {
  static const std::vector<Fault> faults = read_faults();  // throws again each time
  static std::mutex mutex;
  static std::map<int, std::array<std::int64_t, kPoints.size()>> counts;  // of each thread that is a rank
  const int told = t_rank >= 0 ? t_rank : rank_of_process.load(), rank = told >= 0 ? told : number_of("RANK");
  std::int64_t time = 0;
  {
    const std::lock_guard lock(mutex);
    time = ++counts[t_rank][static_cast<std::size_t>(point)];
  }
  const int restart = number_of("RESTART_COUNT");
  for (const Fault& f : faults)
    if (f.rank == rank && f.point == point && f.time == time && f.restart.value_or(0) == restart) act(f);
}

void set_rank(int rank) { rank_of_process = rank; }

RankScope::RankScope(int rank) { t_rank = rank; }
RankScope::~RankScope() { t_rank = -1; }

}  // namespace tandem::fault
