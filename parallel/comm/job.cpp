// The job that this process belongs to: joining it, its groups, and the collectives as free functions.
#include <tandem/parallel/comm/process_group.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <numeric>

#include <fmt/format.h>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/comm/peer_wait.h>
#include <tandem/parallel/comm/rendezvous.h>
#include <tandem/parallel/comm/shm_engine.h>
#include <tandem/parallel/comm/start_environment.h>
#include <tandem/parallel/comm/store_limits.h>
#include <tandem/tensor/cuda.h>
#include <tandem/tensor/fault.h>

namespace tandem::parallel {
namespace {

struct Job {
  Place place;
  Agreement agreement;
  std::string backend;
  double timeout_seconds = 30;
  int groups = 0;
  std::shared_ptr<ProcessGroup> all;  // ends before the store
};
std::atomic<bool> g_process_ends = false;
struct JobOfProcess {
  ~JobOfProcess() { g_process_ends = true; }  // before the job ends
  std::unique_ptr<Job> job = nullptr;
};
// That of the process, or of the calling thread, where threads are ranks.
std::unique_ptr<Job>& job() {
  static JobOfProcess of_process;
  static thread_local std::unique_ptr<Job> of_thread;
  return t_thread_rank != nullptr ? of_thread : of_process.job;
}

#ifdef TANDEM_GLOO
constexpr const char* kBuiltIn = "use \"shm\", \"gloo\", \"mpi\" or \"nccl\"";
#else
constexpr const char* kBuiltIn = "use \"shm\", \"mpi\" or \"nccl\"; for \"gloo\" install libgloo-dev and build again";
#endif

// The function that makes the groups of a backend.
auto maker_of(const std::string& backend) {
  const bool in_thread = t_thread_rank != nullptr;
  check(backend != "thread" || in_thread, kInit, "backend 'thread' is for ranks that spawn_threads starts");
  check(backend == "thread" || backend == "nccl" || !in_thread, kInit,
        "backend '{}' is for ranks that are processes; use \"thread\" within spawn_threads", backend);
  if (backend == "thread") return &make_thread_group;
  if (backend == "nccl") {
    if (!cuda::is_available())
      fail(kInit, "backend 'nccl' is for ranks with a CUDA device each, and there is none: {}",
           cuda::unavailable_reason());
    return &make_nccl_group;
  }
  if (backend == "shm") return &make_shm_group;
  if (backend == "mpi") return &make_mpi_group;
#ifdef TANDEM_GLOO
  if (backend == "gloo") return &make_gloo_group;
#endif
  fail(kInit, "backend '{}' is not built in; {}", backend, kBuiltIn);
}

// A group over nccl serves the CPU too, as the others do, so that ranks need not agree on this.
std::string best_backend(const Agreement& agreement) {
  if (cuda::is_available()) return "nccl";
  if (t_thread_rank != nullptr) return "thread";
  return agreement.one_host() ? "shm" : "gloo";
}

std::vector<int> all_ranks(int world_size) {
  std::vector<int> ranks(static_cast<std::size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Ranks that want different groups would take each other's keys for their own. They may wait for a work of an older
// group before they come.
void compare_lists(const Job& j, const std::string& name, const std::vector<int>& ranks) {
  const std::string mine = fmt::format("{{{}}}", fmt::join(ranks, ", "));
  const auto key = [&](int r) { return fmt::format("{}/ranks/{}", name, r); };
  j.place.store->set(key(j.place.rank), mine);
  const GroupSetup setup{.store = j.place.store,
                         .ranks = all_ranks(j.place.world_size),
                         .world_rank = j.place.rank,
                         .timeout_seconds = j.timeout_seconds};
  const PeerWait others(setup);
  for (int r = 0; r < j.place.world_size; ++r) {
    const std::string theirs = others.value_of(key(r), r, work_for_groups_of_this_thread);
    if (theirs != mine)
      throw CommError(r, fmt::format("{}the ranks disagree: this rank calls new_group({}), rank {} calls new_group({})",
                                     who(j.place.rank, j.place.world_size), mine, r, theirs));
  }
}

std::shared_ptr<ProcessGroup> make_group(Job& j, const std::vector<int>& ranks) {
  std::vector<int> hosts;
  for (const int r : ranks) hosts.push_back(j.agreement.hosts[static_cast<std::size_t>(r)]);
  const std::string name = fmt::format("{}group/{}", j.agreement.prefix, j.groups++);
  if (static_cast<int>(ranks.size()) < j.place.world_size || j.groups > 1) compare_lists(j, name, ranks);
  return maker_of(j.backend)({.store = j.place.store,
                              .name = name,
                              .ranks = ranks,
                              .hosts = hosts,
                              .world_rank = j.place.rank,
                              .store_host = j.place.store_host,
                              .timeout_seconds = j.timeout_seconds});
}

// However the process was started, a fault finds its rank.
void tell_rank(const InitOptions& options) {
  if (!fault::wanted || t_thread_rank != nullptr) return;
  if (options.rank >= 0)
    fault::set_rank(options.rank);
  else if (const std::optional<Setting> rank = start_environment().rank)
    fault::set_rank(rank->value);
}

// A rank that has not joined is not alone: answering 0 of 1 would be wrong.
void check_alone() {
  check(is_initialized() || (!is_launched() && t_thread_rank == nullptr), "process_group",
        "this process or thread is a rank of a job that it has not joined; call init_process_group first");
}

ProcessGroup& group_of(const CollectiveOptions& options) { return options.group ? *options.group : *default_group(); }

Work finish(Work work, const CollectiveOptions& options) {
  if (!options.async_op) work.wait();
  return work;
}

}  // namespace

bool process_ends() { return g_process_ends; }
bool ends_at_once() { return std::uncaught_exceptions() > 0 || process_ends(); }

void init_process_group(const InitOptions& given) {
  check(!job(), kInit, "the process has joined already; call destroy_process_group first");
  tell_rank(given);
  fault::point(fault::Point::start);
  InitOptions options = given;
  options.timeout_seconds = timeout_or_default(kInit, given.timeout_seconds);
  if (!options.backend.empty()) (void)maker_of(options.backend);
  auto next = std::make_unique<Job>();
  next->timeout_seconds = options.timeout_seconds;
  next->place = find_place(options);
  fault::point(fault::Point::init);
  next->agreement = agree(next->place, options);
  next->place.meeting.reset();
  next->backend = options.backend.empty() ? best_backend(next->agreement) : options.backend;
  fault::point(fault::Point::group);
  next->all = make_group(*next, all_ranks(next->place.world_size));  // which waits for all ranks
  note_joined(next->place, next->agreement);
  job() = std::move(next);
}

void destroy_process_group() { job().reset(); }
bool is_initialized() { return job() != nullptr; }
bool is_launched() {
  if (std::getenv(kSpawnCallVariable) != nullptr) return false;
  return std::getenv("RANK") != nullptr || start_environment("is_launched").started_size.value_or(Setting{1}).value > 1;
}

std::shared_ptr<ProcessGroup> default_group() {
  check(is_initialized(), "process_group",
        "the process has not joined a job; call init_process_group first (a thread that a rank of spawn_threads has "
        "started uses the methods of that rank's ProcessGroup)");
  return job()->all;
}

std::shared_ptr<ProcessGroup> or_default(std::shared_ptr<ProcessGroup> group) {
  return group ? std::move(group) : default_group();
}

std::shared_ptr<ProcessGroup> new_group(const std::vector<int>& ranks) {
  (void)default_group();
  check(!ranks.empty(), "new_group", "the list of ranks is empty");
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    check(ranks[i] >= 0 && ranks[i] < world_size(), "new_group", "rank {} is out of range: the job has ranks 0 to {}",
          ranks[i], world_size() - 1);
    check(i == 0 || ranks[i] != ranks[i - 1], "new_group", "rank {} is given twice", ranks[i]);
    check(i == 0 || ranks[i] > ranks[i - 1], "new_group", "rank {} stands behind rank {}; give increasing ranks",
          ranks[i], ranks[i - 1]);
  }
  return make_group(*job(), ranks);
}

Work all_reduce(Tensor& t, const CollectiveOptions& o) { return finish(group_of(o).all_reduce(t, o.op), o); }
Work broadcast(Tensor& t, int root, const CollectiveOptions& o) { return finish(group_of(o).broadcast(t, root), o); }
Work reduce(Tensor& t, int root, const CollectiveOptions& o) { return finish(group_of(o).reduce(t, root, o.op), o); }
Work all_gather(Tensor& output, const Tensor& input, const CollectiveOptions& o) {
  return finish(group_of(o).all_gather(output, input), o);
}
Work gather(Tensor& output, const Tensor& input, int root, const CollectiveOptions& o) {
  return finish(group_of(o).gather(output, input, root), o);
}
Work scatter(Tensor& output, const Tensor& input, int root, const CollectiveOptions& o) {
  return finish(group_of(o).scatter(output, input, root), o);
}
Work reduce_scatter(Tensor& output, const Tensor& input, const CollectiveOptions& o) {
  return finish(group_of(o).reduce_scatter(output, input, o.op), o);
}
Work all_to_all(Tensor& output, const Tensor& input, const CollectiveOptions& o) {
  return finish(group_of(o).all_to_all(output, input), o);
}
Work send(const Tensor& t, int to, const CollectiveOptions& o) { return finish(group_of(o).send(t, to), o); }
Work recv(Tensor& t, int from, const CollectiveOptions& o) { return finish(group_of(o).recv(t, from), o); }
Work barrier(const CollectiveOptions& o) { return finish(group_of(o).barrier(), o); }

int rank() {
  check_alone();
  return is_initialized() ? job()->place.rank : 0;
}
int world_size() {
  check_alone();
  return is_initialized() ? job()->place.world_size : 1;
}

Device local_device() {
  const int count = cuda::device_count();
  if (count == 0) return {};
  const int place = t_thread_rank != nullptr ? t_thread_rank->rank
                                             : start_environment("local_device").local_rank.value_or(Setting{}).value;
  return Device(DeviceType::cuda, place % count);
}

}  // namespace tandem::parallel
