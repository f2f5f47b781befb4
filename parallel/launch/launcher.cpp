#include <tandem/parallel/launch/launcher.h>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include <tandem/parallel/comm/secret.h>
#include <tandem/parallel/comm/start_environment.h>
#include <tandem/parallel/comm/store_server.h>
#include <tandem/parallel/launch/guardian.h>
#include <tandem/parallel/launch/job_processes.h>
#include <tandem/parallel/launch/launch_control.h>
#include <tandem/parallel/launch/nodes.h>
#include <tandem/parallel/launch/rank_environment.h>
#include <tandem/parallel/launch/rank_output.h>
#include <tandem/parallel/launch/rank_process.h>
#include <tandem/parallel/launch/signals.h>
#include <tandem/tensor/error.h>
#include <tandem/tensor/threads.h>

namespace tandem::parallel {
namespace {

using Clock = std::chrono::steady_clock;

// When a job ends, ranks first get the time to say what they have lost, then are asked to end, then made to.
constexpr auto kTimeToEnd = std::chrono::seconds(3);
constexpr int kStepMilliseconds = 20;
constexpr const char* kBeginVariable = "TANDEM_LAUNCH_BEGIN";  // a descriptor into which a rank writes its number

struct Pipe {
  int read_end = -1, write_end = -1;
  explicit Pipe(const char* what, int rank) {
    int ends[2] = {-1, -1};
    const bool made = pipe2(ends, O_CLOEXEC) == 0;
    check(made, "launch", "a pipe for {} of rank {} cannot be made: {}; start fewer ranks, or raise `ulimit -n`", what,
          rank, std::strerror(errno));
    read_end = ends[0];
    write_end = ends[1];
  }
  ~Pipe() {
    if (read_end >= 0) close(read_end);
    close(write_end);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  int take_read_end() { return std::exchange(read_end, -1); }
};

// A rank on this host, in one start of the job.
struct Rank {
  int number;
  RankProcess process;
  RankOutput output;
  int begin = -1;  // readable once the rank has begun
  std::optional<ProcessEnd> end = {};
  bool has_begun() const {
    pollfd wait{begin, POLLIN, 0};
    return begin < 0 || (poll(&wait, 1, 0) > 0 && (wait.revents & POLLIN) != 0);
  }
};

// Where the program has closed standard streams, no descriptor of the launcher takes their place meanwhile.
class StandardDescriptors {
 public:
  StandardDescriptors() {
    for (int fd = 0; fd <= STDERR_FILENO; ++fd) {
      if (fcntl(fd, F_GETFD) >= 0) continue;
      const int nothing = open("/dev/null", O_RDONLY);
      taken_[static_cast<std::size_t>(fd)] = nothing == fd;
      if (nothing != fd) close(nothing);
    }
  }
  ~StandardDescriptors() {
    for (int fd = 0; fd <= STDERR_FILENO; ++fd)
      if (taken_[static_cast<std::size_t>(fd)]) close(fd);
  }
  StandardDescriptors(const StandardDescriptors&) = delete;
  StandardDescriptors& operator=(const StandardDescriptors&) = delete;

 private:
  std::array<bool, STDERR_FILENO + 1> taken_{};
};

class Launcher {
 public:
  Launcher(const std::vector<std::string>& command, const LaunchOptions& options);
  ~Launcher() { forget_ranks(); }
  int run();

 private:
  void announce();
  void start(const Nodes& nodes, int restart);
  void start_rank(const Nodes& nodes, int local_rank, int restart, const std::string& log_folder);
  void forget_ranks();
  void step(Nodes& nodes);
  void rank_has_ended(Rank& rank, Nodes& nodes);
  void report_failure(Rank& rank, Nodes& nodes);
  void take_signals(Nodes* nodes);
  void end_ranks(const Nodes& nodes);
  void send_to_groups(int signal);
  void report(const Nodes& nodes);
  void finish_output();
  int exit_code(const Nodes& nodes) const;
  bool running() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return !r.end; });
  }

  const std::vector<std::string>& command_;
  LaunchOptions options_;
  StandardDescriptors descriptors_;
  const std::string id_ = to_hex(random_bytes()).substr(0, 16);
  const std::string entry_ =
      fmt::format("{}={}", kLauncherIdVariable, id_);  // in the environment of all that ranks start
  std::optional<Guardian> guardian_;
  std::optional<SignalReceiver> signals_;
  std::string secret_;
  const std::string run_id_ = random_run_id();
  Variables own_variables_{{kLauncherIdVariable, id_}};
  std::optional<StoreServer> store_;  // on node 0
  Terminal terminal_;
  int world_size_ = 0;
  std::vector<Rank> ranks_;
  std::optional<Clock::time_point> ending_;
  std::string said_;     // of the failure
  int sent_ = 0;         // the last signal of those that end_ranks sends
  int interrupted_ = 0;  // the signal that has ended the job
};

Launcher::Launcher(const std::vector<std::string>& command, const LaunchOptions& options)
    : command_(command), options_(checked(command, options)) {
  struct sigaction child_ends {};
  sigaction(SIGCHLD, nullptr, &child_ends);
  check(child_ends.sa_handler != SIG_IGN && (child_ends.sa_flags & SA_NOCLDWAIT) == 0, "launch",
        "this program ignores SIGCHLD, so that nobody can learn how a rank has ended; call signal(SIGCHLD, SIG_DFL) "
        "before");
  guardian_.emplace(entry_);
  if (options_.forward_signals) signals_.emplace();
  if (options_.nnodes > 1 || text_from_environment(kSecretFileVariable)) {
    secret_ = secret_from_environment();
  } else {
    secret_ = random_bytes();
    own_variables_.emplace_back(kSecretVariable, to_hex(secret_));
  }
  if (options_.node_rank != 0) return;
  store_.emplace(StoreServerOptions{
      .host = options_.master_addr, .port = options_.master_port, .launched = true, .secret = secret_});
  options_.master_port = store_->port();
  store_->start();
}

void Launcher::announce() {
  if (!options_.announce || !divides_cores()) return;
  const int threads = threads_per_rank(options_);
  terminal_.say(fmt::format("{} cores for {} rank{}: {} thread{} each (set OMP_NUM_THREADS to change that)",
                            available_cores(), options_.nprocs, options_.nprocs == 1 ? "" : "s", threads,
                            threads == 1 ? "" : "s"));
}

int Launcher::run() {
  announce();
  for (int restart = 0;; ++restart) {
    if (restart > 0 && store_) store_->begin_restart(restart);
    Nodes nodes(options_, secret_, run_id_, restart, [this] {
      take_signals(nullptr);
      return interrupted_ != 0;
    });
    if (!nodes.joined()) return 128 + interrupted_;
    start(nodes, restart);
    while (running() || !nodes.settled()) {
      step(nodes);
      if (!running()) nodes.report_done();
    }
    kill_processes_with(entry_);
    report(nodes);
    if (nodes.restart() && interrupted_ == 0) {
      terminal_.say(fmt::format("restart {} of {}", restart + 1, options_.max_restarts));
      continue;
    }
    finish_output();
    const int code = exit_code(nodes);
    if (options_.nnodes > 1)
      terminal_.say(fmt::format("node {} of {} ends with exit code {}", options_.node_rank, options_.nnodes, code));
    return code;
  }
}

void Launcher::start(const Nodes& nodes, int restart) {
  std::fflush(stdout);
  forget_ranks();
  ending_.reset();
  said_.clear();
  sent_ = 0;
  world_size_ = nodes.layout().world_size;
  ranks_.reserve(static_cast<std::size_t>(options_.nprocs));
  const std::string logs =
      options_.log_dir.empty() ? std::string() : make_log_folder(options_.log_dir, restart, terminal_);
  for (int r = 0; r < options_.nprocs; ++r) start_rank(nodes, r, restart, logs);
  if (options_.control == nullptr) return;
  std::vector<int> pids;
  for (const Rank& r : ranks_) pids.push_back(r.process.pid());
  options_.control->set_pids(std::move(pids));
}

void Launcher::start_rank(const Nodes& nodes, int local_rank, int restart, const std::string& log_folder) {
  const int number = nodes.layout().first_rank + local_rank;
  std::optional<Pipe> output, begin;
  if (options_.prefix_output) output.emplace("the output", number);
  if (!options_.must_begin.empty()) begin.emplace("the start", number);
  Variables variables = rank_variables(options_, nodes.layout(), local_rank, restart);
  variables.insert(variables.end(), own_variables_.begin(), own_variables_.end());
  if (begin) variables.emplace_back(kBeginVariable, std::to_string(begin->write_end));
  RankProcess process({.rank = number,
                       .command = &command_,
                       .environment = environment_with(variables),
                       .output = output ? output->write_end : -1,
                       .kept = begin ? begin->write_end : -1});
  const std::string log = log_folder.empty() ? std::string() : fmt::format("{}/rank-{}.log", log_folder, number);
  ranks_.push_back({.number = number,
                    .process = std::move(process),
                    .output = RankOutput(output ? output->take_read_end() : -1,
                                         {.rank = number, .log = log, .tee = options_.tee}, terminal_),
                    .begin = begin ? begin->take_read_end() : -1});
}

void Launcher::forget_ranks() {
  for (Rank& r : ranks_)
    if (r.begin >= 0) close(r.begin);
  if (ranks_.empty()) return;
  ranks_.clear();
  kill_processes_with(entry_);
}

// Waits a moment for something to happen, and does what follows from it.
void Launcher::step(Nodes& nodes) {
  std::vector<pollfd> waits;
  const bool full = terminal_.full();  // ranks wait for the reader then
  for (const Rank& r : ranks_) waits.push_back({full ? -1 : r.output.pipe(), POLLIN, 0});  // poll ignores -1
  for (const Rank& r : ranks_) waits.push_back({r.process.descriptor(), POLLIN, 0});
  poll(waits.data(), waits.size(), kStepMilliseconds);
  std::vector<Rank*> ended;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    Rank& r = ranks_[i];
    if (waits[i].revents != 0) r.output.take();
    if (r.end || !(r.end = r.process.ended())) continue;
    ended.push_back(&r);
  }
  // Of those that have ended since the last look, one that was killed is rather the cause than one that has failed.
  std::stable_partition(ended.begin(), ended.end(), [](const Rank* r) { return r->end->by_signal; });
  for (Rank* r : ended) rank_has_ended(*r, nodes);
  take_signals(&nodes);
  end_ranks(nodes);
  if (!guardian_->alive()) guardian_.emplace(entry_);
}

void Launcher::rank_has_ended(Rank& rank, Nodes& nodes) {
  rank.process.reap();
  rank.output.finish();
  const std::string end = rank.end->text();
  report_failure(rank, nodes);
  // After the failure, so that what other ranks make of it cannot be taken for the first one.
  if (options_.nnodes == 1)
    store_->report_end(rank.number, end);
  else
    nodes.report_end(rank.number, end);
}

void Launcher::report_failure(Rank& rank, Nodes& nodes) {
  const ProcessEnd end = *rank.end;
  if (end.good() && rank.has_begun()) return;
  const std::string who = fmt::format("rank {} of {} ", rank.number, world_size_);
  const std::string how = end.good()                    ? fmt::format("ended before it came to {}", options_.must_begin)
                          : end.by_signal || !end.known ? end.text()
                                                        : fmt::format("failed with exit code {}", end.number);
  if (end.good()) rank.end->number = 1;
  const auto& lines = rank.output.last_lines();
  nodes.report_failure({.what = who + how,
                        .where = nodes.here(),
                        .exit_code = rank.end->exit_code(),
                        .last_lines = {lines.begin(), lines.end()}});
}

void Launcher::take_signals(Nodes* nodes) {
  if (options_.control != nullptr && options_.control->killed() && interrupted_ == 0) {
    interrupted_ = sent_ = SIGKILL;
    send_to_groups(SIGKILL);
    if (nodes != nullptr) nodes->report_failure({.what = "the job was ended by its handle", .final = true});
  }
  while (const std::optional<int> signal = signals_ ? signals_->next() : std::nullopt) {
    if (!ends_job(*signal)) {
      for (const Rank& r : ranks_)
        if (!r.end) r.process.send(*signal);
      continue;
    }
    if (interrupted_ != 0) {
      const bool again = *signal == interrupted_;  // another one comes from a launcher around this one, in its time
      if (again) sent_ = SIGKILL;
      send_to_groups(again ? SIGKILL : *signal);
      continue;
    }
    interrupted_ = *signal;
    send_to_groups(*signal);
    if (nodes != nullptr)
      nodes->report_failure({.what = fmt::format("the launcher got {}", signal_name(*signal)),
                             .where = nodes->here(),
                             .exit_code = 128 + *signal,
                             .final = true});
  }
}

void Launcher::end_ranks(const Nodes& nodes) {
  const std::optional<Failure> failure = nodes.failure();
  if (!failure) return;
  const auto now = Clock::now();
  if (!ending_) ending_ = now;
  if (std::exchange(said_, failure->what) != failure->what && (running() || options_.nnodes > 1))
    terminal_.say(fmt::format("{}; the {}ranks are ended", failure->what, interrupted_ == 0 ? "other " : ""));
  const int signal = now > *ending_ + 2 * kTimeToEnd ? SIGKILL : now > *ending_ + kTimeToEnd ? SIGTERM : 0;
  if (signal == 0 || signal == sent_ || sent_ == SIGKILL) return;
  sent_ = signal;
  send_to_groups(signal);
}

void Launcher::send_to_groups(int signal) {
  for (const Rank& r : ranks_)
    if (!r.end) r.process.send_to_group(signal);
}

void Launcher::report(const Nodes& nodes) {
  const std::optional<Failure> failure = nodes.failure();
  if (!failure || interrupted_ != 0) return;
  std::string text = fmt::format("the job has failed: {}{}{}{}", failure->what, failure->where.empty() ? "" : " (",
                                 failure->where, failure->where.empty() ? "" : ")");
  if (!failure->last_lines.empty())
    text += fmt::format("; its last lines:\n  | {}", fmt::join(failure->last_lines, "\n  | "));
  terminal_.say(text);
  for (const Rank& r : ranks_) {
    const std::string name = fmt::format("rank {} of {} ", r.number, world_size_);
    if (r.end->good() || failure->what.starts_with(name)) continue;
    const bool by_us = sent_ != 0 && r.end->by_signal && (r.end->number == SIGTERM || r.end->number == SIGKILL);
    terminal_.say(fmt::format("then {}{}", name, by_us ? "was ended by the launcher" : r.end->text()));
  }
}

// Whoever reads the output may take his time, until a signal comes.
void Launcher::finish_output() {
  while (interrupted_ == 0 && !terminal_.drain(kStepMilliseconds)) take_signals(nullptr);
}

int Launcher::exit_code(const Nodes& nodes) const {
  if (interrupted_ != 0) return 128 + interrupted_;
  const std::optional<Failure> failure = nodes.failure();
  return failure ? failure->exit_code : terminal_.failed() ? 1 : 0;
}

}  // namespace

int launch(const std::vector<std::string>& command, const LaunchOptions& options) {
  return Launcher(command, options).run();
}

void rank_begins() {
  const std::optional<int> descriptor = number_from_environment(kBeginVariable);
  if (!descriptor) return;
  (void)!write(*descriptor, "b", 1);
  close(*descriptor);
  unsetenv(kBeginVariable);
}

}  // namespace tandem::parallel
