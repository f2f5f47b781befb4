#include <tandem/parallel/launch/rank_environment.h>

#include <algorithm>

#include <fmt/format.h>

#include <tandem/parallel/comm/rendezvous.h>
#include <tandem/parallel/comm/secret.h>
#include <tandem/parallel/comm/start_environment.h>
#include <tandem/parallel/launch/job_processes.h>
#include <tandem/tensor/error.h>
#include <tandem/tensor/threads.h>

extern char** environ;

namespace tandem::parallel {
namespace {

constexpr const char* kLaunch = "launch";
constexpr int kMaxNodes = 1 << 16;
constexpr double kLeastTimeout = 0.1;

std::string quoted(const std::string& text) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%";
  if (!text.empty() && text.find_first_not_of(kPlain) == std::string::npos) return text;
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

}  // namespace

LaunchOptions checked(const std::vector<std::string>& command, LaunchOptions o) {
  check(!command.empty() && !command[0].empty(), kLaunch, "there is no program to start");
  check(o.nprocs >= 1 && o.nprocs <= kMaxRanksPerNode, kLaunch, "{} processes on a host were asked for; give 1 to {}",
        o.nprocs, kMaxRanksPerNode);
  check(o.nnodes >= 1 && o.nnodes <= kMaxNodes, kLaunch, "{} nodes were asked for; give 1 to {}", o.nnodes, kMaxNodes);
  check(o.node_rank >= 0 && o.node_rank < o.nnodes, kLaunch, "node rank {} is out of range: give 0 to {}", o.node_rank,
        o.nnodes - 1);
  check(o.max_restarts >= 0, kLaunch, "{} restarts were asked for; give 0 or more", o.max_restarts);
  check(o.master_port >= 0 && o.master_port <= 65535, kLaunch, "port {} is out of range: give 1 to 65535",
        o.master_port);
  check(o.nnodes == 1 || (!o.master_addr.empty() && o.master_port != 0), kLaunch,
        "several nodes need --master-addr, an address of node 0 that the others reach, and --master-port, the same on "
        "all");
  check(o.nnodes == 1 || text_from_environment(kSecretFileVariable) || text_from_environment(kSecretVariable), kLaunch,
        "several nodes need a secret, so that nobody else can join; make one with: (umask 077; openssl rand -hex 32 > "
        "tandem.secret), copy it to every node, and set {} to its path there",
        kSecretFileVariable);
  check(!o.tee || !o.log_dir.empty(), kLaunch, "--tee copies what goes into logs; give --log-dir too, or leave it out");
  if (o.master_addr.empty()) o.master_addr = "127.0.0.1";
  o.timeout_seconds = timeout_or_default(kLaunch, o.timeout_seconds);
  check(o.timeout_seconds >= kLeastTimeout, kLaunch, "a timeout of {} s was asked for; give {} s or more",
        o.timeout_seconds, kLeastTimeout);
  return o;
}

bool divides_cores() { return !text_from_environment("OMP_NUM_THREADS"); }
int threads_per_rank(const LaunchOptions& o) { return std::max(1, available_cores() / o.nprocs); }

Variables rank_variables(const LaunchOptions& o, const Layout& layout, int local_rank, int restart) {
  const std::string rank = std::to_string(layout.first_rank + local_rank), world = std::to_string(layout.world_size);
  Variables v = o.environment;
  v.insert(v.end(), {{"RANK", rank},
                     {"LOCAL_RANK", std::to_string(local_rank)},
                     {"GROUP_RANK", std::to_string(o.node_rank)},
                     {"ROLE_RANK", rank},
                     {"WORLD_SIZE", world},
                     {"LOCAL_WORLD_SIZE", std::to_string(o.nprocs)},
                     {"ROLE_WORLD_SIZE", world},
                     {"MASTER_ADDR", o.master_addr},
                     {"MASTER_PORT", o.master_port == 0 ? "(given by the system)" : std::to_string(o.master_port)},
                     {kLauncherStoreVariable, "1"},
                     {kRestartVariable, std::to_string(restart)},
                     {"TORCHELASTIC_RESTART_COUNT", std::to_string(restart)},
                     {"TORCHELASTIC_MAX_RESTARTS", std::to_string(o.max_restarts)},
                     {"TORCHELASTIC_RUN_ID", layout.run_id},
                     {kTimeoutVariable, fmt::format("{}", o.timeout_seconds)}});
  if (divides_cores()) v.emplace_back("OMP_NUM_THREADS", std::to_string(threads_per_rank(o)));
  return v;
}

std::vector<std::string> environment_with(const Variables& variables) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry), name = text.substr(0, text.find('='));
    const auto replaces = [&](const auto& v) { return v.first == name; };
    if (std::none_of(variables.begin(), variables.end(), replaces)) result.emplace_back(text);
  }
  for (const auto& [name, value] : variables) result.push_back(name + "=" + value);
  return result;
}

std::string describe_launch(const std::vector<std::string>& command, const LaunchOptions& options) {
  const LaunchOptions o = checked(command, options);
  const Layout layout{.first_rank = o.node_rank * o.nprocs, .world_size = o.nnodes * o.nprocs, .run_id = "(random)"};
  std::string text;
  for (int r = 0; r < o.nprocs; ++r) {
    std::vector<std::string> words;
    for (const auto& [name, value] : rank_variables(o, layout, r, 0)) words.push_back(name + "=" + quoted(value));
    if (o.nnodes == 1 && !text_from_environment(kSecretFileVariable))
      words.push_back(fmt::format("{}='(random)'", kSecretVariable));
    words.push_back(fmt::format("{}='(random)'", kLauncherIdVariable));
    for (const std::string& word : command) words.push_back(quoted(word));
    text += fmt::format("{}\n", fmt::join(words, " "));
  }
  if (o.nnodes > 1) text += fmt::format("# if each of the {} nodes has {} ranks (-n)\n", o.nnodes, o.nprocs);
  return text;
}

}  // namespace tandem::parallel
