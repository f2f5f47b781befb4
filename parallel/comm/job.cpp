// The job that this process belongs to: joining it, its groups, and the collectives as free functions.
#include <tandem/parallel/comm/process_group.h>

#include <charconv>
#include <cstdlib>

#include <tandem/parallel/comm/shm_group.h>

namespace tandem::parallel {
namespace {

struct Job {
  int rank = 0, world_size = 1;
  ShmHeader* segment = nullptr;
  double timeout_seconds = 30;
  int groups = 0;
  std::shared_ptr<ProcessGroup> all;
};
std::unique_ptr<Job>& job() {
  static std::unique_ptr<Job> current;
  return current;
}

std::optional<int> number_from_environment(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr) return std::nullopt;
  int value = -1;
  const std::string_view digits(text);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  check(error == std::errc() && end == digits.data() + digits.size() && value >= 0, "init_process_group",
        "{} is '{}'; it must be a number", variable, text);
  return value;
}

int required(const char* variable, int given) {
  if (given >= 0) return given;
  const auto value = number_from_environment(variable);
  check(value.has_value(), "init_process_group",
        "{} is not set; start the program with `tandem-run -n N program`, or call spawn", variable);
  return *value;
}

std::shared_ptr<ProcessGroup> make_group(const std::vector<int>& ranks) {
  Job& j = *job();
  check(j.groups < kMaxShmGroups, "new_group", "there are {} groups already; at most {} are supported", j.groups,
        kMaxShmGroups);
  return std::make_shared<ShmGroup>(j.segment, j.groups++, ranks, j.rank, j.timeout_seconds);
}

// A rank that has not joined is not alone: answering 0 of 1 would be wrong.
void check_alone() {
  check(is_initialized() || std::getenv("RANK") == nullptr, "process_group",
        "this process is a rank of a job that it has not joined; call init_process_group first");
}

ProcessGroup& group_of(const CollectiveOptions& options) { return options.group ? *options.group : *default_group(); }

Work finish(Work work, const CollectiveOptions& options) {
  if (!options.async_op) work.wait();
  return work;
}

}  // namespace

void init_process_group(const InitOptions& options) {
  check(!job(), "init_process_group", "the process has joined already; call destroy_process_group first");
  check(options.backend.empty() || options.backend == "shm", "init_process_group",
        "backend '{}' is not built in; use \"shm\"", options.backend);
  auto next = std::make_unique<Job>();
  next->rank = required("RANK", options.rank);
  next->world_size = required("WORLD_SIZE", options.world_size);
  check(next->rank < next->world_size, "init_process_group", "rank {} is out of range: WORLD_SIZE is {}", next->rank,
        next->world_size);
  check(options.timeout_seconds > 0, "init_process_group", "timeout_seconds is {}; it must be positive",
        options.timeout_seconds);
  next->timeout_seconds = options.timeout_seconds;
  next->segment = map_shm_segment(required(kShmVariable, -1), next->world_size);
  job() = std::move(next);
  std::vector<int> ranks;
  for (int r = 0; r < job()->world_size; ++r) ranks.push_back(r);
  job()->all = make_group(ranks);
  job()->all->barrier().wait();
}

void destroy_process_group() { job().reset(); }
bool is_initialized() { return job() != nullptr; }

std::shared_ptr<ProcessGroup> default_group() {
  check(is_initialized(), "process_group", "the process has not joined a job; call init_process_group first");
  return job()->all;
}

std::shared_ptr<ProcessGroup> new_group(const std::vector<int>& ranks) {
  (void)default_group();
  check(!ranks.empty(), "new_group", "the list of ranks is empty");
  for (std::size_t i = 0; i < ranks.size(); ++i)
    check(ranks[i] >= 0 && ranks[i] < world_size() && (i == 0 || ranks[i] > ranks[i - 1]), "new_group",
          "rank {} is out of range or order: give increasing ranks from 0 to {}", ranks[i], world_size() - 1);
  return make_group(ranks);
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
Work barrier(const CollectiveOptions& o) { return finish(group_of(o).barrier(), o); }

int rank() {
  check_alone();
  return is_initialized() ? job()->rank : 0;
}
int world_size() {
  check_alone();
  return is_initialized() ? job()->world_size : 1;
}

Device local_device() {
  if (cuda::is_available()) return Device(DeviceType::cuda, number_from_environment("LOCAL_RANK").value_or(0));
  return Device();
}

}  // namespace tandem::parallel
