// The variables of launchers, and the identities of processes.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <map>

#include <tandem/parallel/comm/process_group.h>
#include <tandem/parallel/comm/process_identity.h>
#include <tandem/parallel/comm/start_environment.h>
#include <tandem/tests/support/test.h>

using namespace tandem;
using parallel::start_environment;

namespace {

using Map = std::map<std::string, std::string>;

// Variables for as long as it lives, and no others of any launcher.
class Variables {
 public:
  explicit Variables(const Map& values) {
    for (const char* name :
         {"RANK",         "WORLD_SIZE",    "LOCAL_RANK",      "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
          "PMI_RANK",     "PMI_SIZE",      "MPI_LOCALRANKID", "MPI_LOCALNRANKS",      "OMPI_COMM_WORLD_LOCAL_RANK",
          "PMIX_RANK",    "SLURM_PROCID",  "SLURM_NTASKS",    "SLURM_LOCALID",        "OMPI_COMM_WORLD_LOCAL_SIZE",
          "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NNODES",    "PMIX_NAMESPACE",       "SLURM_STEP_NUM_NODES"})
      unsetenv(name);
    for (const auto& [name, value] : values) {
      setenv(name.c_str(), value.c_str(), 1);
      names_.push_back(name);
    }
  }
  ~Variables() {
    for (const std::string& name : names_) unsetenv(name.c_str());
  }
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;

 private:
  std::vector<std::string> names_;
};

std::string text(const std::optional<parallel::Setting>& s) {
  return s ? fmt::format("{}={}", s->variable, s->value) : "none";
}
std::string place() {
  const parallel::StartEnvironment e = start_environment();
  return fmt::format("{} {} {}{}", text(e.rank), text(e.world_size), text(e.local_rank), e.one_host ? " one host" : "");
}

const Map kMpirun = {{"OMPI_COMM_WORLD_RANK", "1"},
                     {"OMPI_COMM_WORLD_SIZE", "4"},
                     {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                     {"PMIX_NAMESPACE", "77"}};
const Map kSrun = {{"SLURM_PROCID", "3"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "2"},       {"SLURM_STEP_ID", "0"},
                   {"SLURM_NNODES", "4"}, {"SLURM_JOB_ID", "9"}, {"SLURM_STEP_NUM_NODES", "1"}};
Map both(Map a, const Map& b) {
  for (const auto& [name, value] : b) a[name] = value;
  return a;
}

}  // namespace

TEST_CASE("each launcher's variables give the place") {
  {
    const Variables none(Map{});
    CHECK(place() == "none none none");
    CHECK(start_environment().job_id.empty());
    CHECK_FALSE(parallel::is_launched());
    CHECK_FALSE(parallel::started_by_mpi());
    CHECK(parallel::rank() == 0);
    CHECK(parallel::world_size() == 1);
  }
  {
    const Variables torchrun({{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"LOCAL_RANK", "1"}});
    CHECK(place() == "RANK=2 WORLD_SIZE=3 LOCAL_RANK=1");
    CHECK(parallel::is_launched());
    CHECK(start_environment().job_id.empty());
    setenv("TANDEM_SPAWN_CALL", "1:main.cpp:5", 1);
    CHECK_FALSE(parallel::is_launched());  // on its way to the call of spawn
    unsetenv("TANDEM_SPAWN_CALL");
  }
  {
    const Variables mpirun(kMpirun);
    CHECK(place() == "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0");
    CHECK(parallel::is_launched());
    CHECK(parallel::started_by_mpi());
    CHECK_ERROR(parallel::rank(), "a rank of a job that it has not joined; call init_process_group first");
    const std::string job = start_environment().job_id;
    const Variables other(both(kMpirun, {{"PMIX_NAMESPACE", "78"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}));
    CHECK(start_environment().job_id != job);
    CHECK(start_environment().one_host);
  }
  {
    const Variables hydra({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}});
    CHECK(place() == "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 one host");
    CHECK(parallel::started_by_mpi());
    CHECK(start_environment().job_id == "mpiexec " + parallel::identity_of(getppid()));
  }
  {
    const Variables srun(kSrun);
    CHECK(place() == "SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=2 one host");
    CHECK(start_environment().job_id == "srun 9 0");
    CHECK(parallel::is_launched());
    CHECK_FALSE(parallel::started_by_mpi());
  }
}

TEST_CASE("which variables go before which") {
  {
    const Variables pmi(both(kSrun, {{"PMI_RANK", "5"}, {"PMI_SIZE", "6"}, {"PMIX_RANK", "3"}}));
    CHECK(place() == "SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=2 one host");
    CHECK(parallel::started_by_mpi());
  }
  {
    const Variables mpirun_in_a_step(both(kSrun, kMpirun));
    CHECK(place() == "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0");
  }
  {
    const Variables given(both(kSrun, {{"RANK", "0"}, {"LOCAL_RANK", "7"}}));
    CHECK(place() == "RANK=0 SLURM_NTASKS=8 LOCAL_RANK=7 one host");
    CHECK(text(start_environment().started_rank) == "SLURM_PROCID=3");
  }
  {
    Map script = kSrun;
    script.erase("SLURM_STEP_ID");
    const Variables batch(script);
    CHECK(place() == "none none none");
    CHECK_FALSE(parallel::is_launched());
  }
  {
    const Variables single(both(kSrun, {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}));
    CHECK_FALSE(parallel::is_launched());
    CHECK(parallel::world_size() == 1);
  }
  const Variables wrong(Map{{"LOCAL_RANK", "first"}});
  CHECK_ERROR(start_environment(), "LOCAL_RANK is 'first'; it must be a whole number from 0 to 2147483647");
}

TEST_CASE("a process is known by its number and the time of its start") {
  const std::string self = parallel::identity_of(getpid());
  CHECK(parallel::is_running(self));
  CHECK_FALSE(parallel::is_running(self + "0"));
  for (const char* text : {"", "x", "-1 5", "0 0"}) CHECK_FALSE(parallel::is_running(text));
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  const std::string identity = parallel::identity_of(child);
  CHECK(parallel::is_running(identity));
  kill(child, SIGKILL);
  siginfo_t about{};
  waitid(P_PID, static_cast<id_t>(child), &about, WEXITED | WNOWAIT);
  CHECK_FALSE(parallel::is_running(identity));  // it has ended, though its number is not free yet
  waitpid(child, nullptr, 0);
  CHECK_FALSE(parallel::is_running(identity));
  CHECK(parallel::identity_of(child).empty());
}
