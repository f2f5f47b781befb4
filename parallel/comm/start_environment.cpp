#include <tandem/parallel/comm/start_environment.h>

#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <limits>

#include <tandem/parallel/comm/process_identity.h>
#include <tandem/parallel/comm/store_limits.h>
#include <tandem/tensor/error.h>

namespace tandem::parallel {
namespace {

std::optional<Setting> setting(const char* op, const char* variable) {
  const std::optional<int> value = number_from_environment(variable, op);
  return value ? std::optional<Setting>({*value, variable}) : std::nullopt;
}

std::string text_of(const char* variable) { return text_from_environment(variable).value_or(""); }

bool are_equal(const std::optional<Setting>& a, const std::optional<Setting>& b) {
  return a && b && a->value == b->value;
}

StartEnvironment launcher_environment(const char* op) {
  StartEnvironment e;
  const auto read = [&](const char* rank, const char* size, const char* local) {
    e.started_rank = setting(op, rank);
    e.started_size = setting(op, size);
    e.local_rank = setting(op, local);
  };
  if (std::getenv("OMPI_COMM_WORLD_RANK") != nullptr) {
    read("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK");
    e.one_host = are_equal(e.started_size, setting(op, "OMPI_COMM_WORLD_LOCAL_SIZE"));
    // Namespaces repeat after a while; the addresses of an mpirun are its own while it lives.
    e.job_id = "mpirun " + text_of("PMIX_NAMESPACE") + " " + text_of("PMIX_SERVER_URI2");
  } else if (std::getenv("PMI_RANK") != nullptr && std::getenv("SLURM_STEP_ID") == nullptr) {
    read("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID");
    e.one_host = are_equal(e.started_size, setting(op, "MPI_LOCALNRANKS"));
    e.job_id = "mpiexec " + identity_of(getppid());  // it has no name, but one process starts all ranks of a host
  } else if (std::getenv("SLURM_PROCID") != nullptr && std::getenv("SLURM_STEP_ID") != nullptr) {
    // A batch script has a SLURM_PROCID too, but is no rank: srun alone makes steps.
    read("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID");
    const char* nodes = std::getenv("SLURM_STEP_NUM_NODES") != nullptr ? "SLURM_STEP_NUM_NODES" : "SLURM_NNODES";
    e.one_host = number_from_environment(nodes, op) == 1;
    e.job_id = "srun " + text_of("SLURM_JOB_ID") + " " + text_of("SLURM_STEP_ID");
  }
  return e;
}

}  // namespace

StartEnvironment start_environment(const char* op) {
  StartEnvironment e = launcher_environment(op);
  const std::optional<Setting> rank = setting(op, "RANK"), size = setting(op, "WORLD_SIZE"),
                               local = setting(op, "LOCAL_RANK");
  e.rank = rank ? rank : e.started_rank;
  e.world_size = size ? size : e.started_size;
  if (local) e.local_rank = local;
  return e;
}

bool started_by_mpi() {
  for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"})
    if (std::getenv(variable) != nullptr) return true;
  return false;
}

double timeout_or_default(const char* op, double seconds) {
  if (seconds != 0) return usable_timeout(op, seconds);
  const std::optional<std::string> text = text_from_environment(kTimeoutVariable);
  if (!text) return 30;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), seconds);
  check(error == std::errc() && end == text->data() + text->size() && seconds > 0, op,
        "{} is '{}'; it must be a positive number of seconds", kTimeoutVariable, *text);
  return usable_timeout(op, seconds);
}

std::optional<int> number_from_environment(const char* variable, const char* op) {
  const char* text = std::getenv(variable);
  if (text == nullptr) return std::nullopt;
  int value = -1;
  const std::string_view digits(text);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  check(error == std::errc() && end == digits.data() + digits.size() && value >= 0, op,
        "{} is '{}'; it must be a whole number from 0 to {}", variable, text, std::numeric_limits<int>::max());
  return value;
}

std::optional<std::string> text_from_environment(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr || *text == '\0' ? std::nullopt : std::optional<std::string>(text);
}

}  // namespace tandem::parallel
