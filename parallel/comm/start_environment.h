// The variables by which a launcher tells a process its place: those of torchrun, and mpirun's and srun's.
#pragma once
#include <optional>
#include <string>

namespace tandem::parallel {

/// A number that the environment gives, and the variable that it stands in.
struct Setting {
  int value = 0;
  const char* variable = "";
};

/// What the environment says about this process's place in its job.
struct StartEnvironment {
  // RANK, WORLD_SIZE and LOCAL_RANK; where one is not set, that of mpirun or srun.
  std::optional<Setting> rank = {}, world_size = {}, local_rank = {};
  // What mpirun or srun says, also where it is set aside.
  std::optional<Setting> started_rank = {}, started_size = {};
  bool one_host = false;    // mpirun or srun has started all processes on this host
  std::string job_id = {};  // the same in those processes alone; empty when they were started in another way
};

/// The operation that errors of joining a job name.
inline constexpr const char* kInit = "init_process_group";
/// Reads Open MPI's variables, or else MPICH's, or else Slurm's, the latter in steps that srun has started. Error when
/// a variable is no number, in the name of `op`.
StartEnvironment start_environment(const char* op = kInit);
/// Whether an MPI has started this process, and so MPI can be initialised as one of several ranks.
bool started_by_mpi();
/// Set in a process that spawn has started and that has not come to its call yet.
inline constexpr const char* kSpawnCallVariable = "TANDEM_SPAWN_CALL";
/// How long a silent rank is waited for, where nothing else is said: a launcher sets it by --timeout.
inline constexpr const char* kTimeoutVariable = "TANDEM_TIMEOUT";
/// The seconds that were given; for 0 what the variable says, or 30. Error when that is no positive number.
double timeout_or_default(const char* op, double seconds);
/// A number from the environment; null when the variable is not set, Error when it is no number.
std::optional<int> number_from_environment(const char* variable, const char* op = kInit);
/// A text from the environment; null when the variable is not set, or empty.
std::optional<std::string> text_from_environment(const char* variable);

}  // namespace tandem::parallel
