// The backend mpi: opens the module that knows MPI when it is first asked for, so that the library itself needs none.
#include <cstdlib>

#include <fmt/format.h>

#include <tandem/parallel/comm/mpi_module.h>
#include <tandem/parallel/comm/start_environment.h>
#include <tandem/tensor/error.h>
#include <tandem/tensor/open_module.h>

namespace tandem::parallel {
namespace {

MpiEntry* open_entry() {
  std::string reason;
  void* const entry = open_module(kMpiModule, kMpiModuleVariable, kMpiEntry, reason);
  check(entry != nullptr, kInit,
        "backend 'mpi' is not built in, or its module cannot be opened: {}; install libopenmpi-dev and build again",
        reason);
  return reinterpret_cast<MpiEntry*>(entry);
}

MpiEntry* module_entry() {
  static MpiEntry* const entry = open_entry();
  return entry;
}

}  // namespace

void check_mpi() {
  (void)module_entry();
  check(started_by_mpi(), kInit,
        "backend 'mpi' needs a process that MPI has started; start the program with `mpirun -n N program`");
}

std::shared_ptr<ProcessGroup> make_mpi_group(const GroupSetup& setup) {
  return make_mesh_group(setup, "mpi", [](const GroupSetup& s, int rank) {
    std::unique_ptr<Mesh> mesh(module_entry()(s, rank));
    // The module finalises MPI at the end of the program unless a group is left. This runs before that.
    [[maybe_unused]] static const int registered = std::atexit(destroy_process_group);
    return mesh;
  });
}

}  // namespace tandem::parallel
