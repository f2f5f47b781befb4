#include <tandem/parallel/comm/mpi_runtime.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include <fmt/format.h>

#include <tandem/parallel/comm/start_environment.h>

namespace tandem::parallel {
namespace {

// Error's text, or empty. On MPI's own thread, where nothing may throw.
std::string initialise(MPI_Comm& comm, int& largest_tag, int& rank, int& size, bool& is_ours) {
  int before = 0, level = MPI_THREAD_SINGLE;
  MPI_Initialized(&before);
  is_ours = before == 0;
  const int code = is_ours ? MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level) : MPI_Query_thread(&level);
  if (code != MPI_SUCCESS) return fmt::format("MPI_Init_thread failed: {}", mpi_text(code));
  if (level < MPI_THREAD_MULTIPLE)
    return fmt::format("MPI gives thread level {} where MPI_THREAD_MULTIPLE ({}) is needed; {}", level,
                       int{MPI_THREAD_MULTIPLE},
                       is_ours ? "use an MPI that was built with it" : "initialise MPI with MPI_Init_thread");
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (const int made = MPI_Comm_dup(MPI_COMM_WORLD, &comm); made != MPI_SUCCESS)
    return fmt::format("MPI_Comm_dup failed: {}", mpi_text(made));
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  int* tag = nullptr;
  int known = 0;
  MPI_Comm_get_attr(comm, MPI_TAG_UB, static_cast<void*>(&tag), &known);
  constexpr int kLeastTag = 32767;  // that every MPI allows
  largest_tag = known != 0 ? *tag : kLeastTag;
  return {};
}

// Waits for ranks that have not come as far, as mpirun would in any case. MPI_Finalize does so too, but there
// Open MPI's mpirun crashes or hangs at times when it has to end the job meanwhile.
void wait_for_all(MPI_Comm comm) {
  MPI_Request barrier = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(comm, &barrier) != MPI_SUCCESS) return;
  for (int done = 0; MPI_Test(&barrier, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done == 0;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

std::string mpi_text(int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  return text;
}

MpiRuntime& MpiRuntime::get() {
  static auto* const runtime = new MpiRuntime;
  return *runtime;
}

void MpiRuntime::run() {
  MPI_Comm all = MPI_COMM_NULL;
  int tag = 0, rank = -1, size = 0;
  bool is_ours = false;
  std::string error = initialise(all, tag, rank, size, is_ours);
  std::unique_lock lock(mutex);
  comm = all;
  largest_tag = tag;
  rank_ = rank;
  size_ = size;
  error_ = std::move(error);
  phase_ = is_ours ? Phase::running : Phase::ended;  // a program that has initialised MPI also finalises it
  changed_.notify_all();
  if (!is_ours) return;
  changed_.wait(lock, [this] { return phase_ == Phase::ending; });
  lock.unlock();
  wait_for_all(all);
  MPI_Finalize();
  lock.lock();
  phase_ = Phase::ended;
  changed_.notify_all();
}

void MpiRuntime::leave(int status) {
  if (getpid() != process_) return;  // a child that ends has no MPI
  std::unique_lock lock(mutex);
  // With a group left, the program ends in the middle of something, which mpirun shall see, and not MPI_Finalize hide.
  if (phase_ != Phase::running || over || meshes > 0 || status != 0 || !error_.empty()) return;
  over = true;
  phase_ = Phase::ending;
  changed_.notify_all();
  changed_.wait(lock, [this] { return phase_ == Phase::ended; });
}

void MpiRuntime::start(const GroupSetup& setup, int rank) {
  // The first group has all ranks; those that come here are not the ones that are missing.
  const auto key = [](int r) { return fmt::format("mpi/starting/{}", r); };
  setup.store->set(key(setup.world_rank), "");
  std::unique_lock lock(mutex);
  const int group_size = static_cast<int>(setup.ranks.size());
  if (phase_ == Phase::none) {
    phase_ = Phase::starting;
    std::thread([this] { run(); }).detach();
    // Unlike atexit it tells how the program ends.
    on_exit([](int status, void* self) { static_cast<MpiRuntime*>(self)->leave(status); }, this);
  }
  if (!changed_.wait_for(lock, std::chrono::duration<double>(setup.timeout_seconds),
                         [this] { return phase_ != Phase::starting; })) {
    over = true;
    lock.unlock();
    int missing = -1;
    for (const int r : setup.ranks)
      if (missing < 0 && !setup.store->check(key(r))) missing = r;
    throw CommError(missing,
                    fmt::format("rank {} of {}: waited {} s in MPI_Init_thread for {}; a longer wait is set by "
                                "InitOptions::timeout_seconds",
                                rank, group_size, setup.timeout_seconds,
                                missing < 0 ? "another rank" : fmt::format("rank {}", missing)));
  }
  check(error_.empty(), kInit, "{}", error_);
  check(rank_ == setup.world_rank && size_ > setup.ranks.back(), kInit,
        "this process is rank {} of {} for MPI, but joins as rank {} of {}; leave out rank and world_size", rank_,
        size_, setup.world_rank, setup.ranks.size());
}

}  // namespace tandem::parallel
