// The backend mpi: opens the module that knows MPI when it is first asked for, so that the library itself needs none.
#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

#include <fmt/format.h>

#include <tandem/parallel/comm/mpi_module.h>
#include <tandem/parallel/comm/start_environment.h>
#include <tandem/tensor/error.h>

namespace tandem::parallel {
namespace {

constexpr const char* kOp = "init_process_group";

// Beside the library, or the program where it is linked statically.
std::filesystem::path path_beside_library() {
  Dl_info about{};
  const bool known = dladdr(reinterpret_cast<const void*>(&check_mpi), &about) != 0 && about.dli_fname != nullptr;
  return known ? std::filesystem::path(about.dli_fname).parent_path() / kMpiModule : std::filesystem::path(kMpiModule);
}

MpiEntry* open_module() {
  const std::optional<std::string> named = text_from_environment(kMpiModuleVariable);
  std::string path = named ? *named : path_beside_library().string();
  if (!named && !std::filesystem::exists(path)) path = kMpiModule;  // where the system looks for libraries
  void* const module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  const char* const reason = module == nullptr ? dlerror() : "";
  check(module != nullptr, kOp,
        "backend 'mpi' is not built in, or its module cannot be opened: {}; install libopenmpi-dev and build again",
        reason);
  void* const entry = dlsym(module, kMpiEntry);
  check(entry != nullptr, kOp, "'{}' is no module of this version of Tandem: it has no function {}", path, kMpiEntry);
  return reinterpret_cast<MpiEntry*>(entry);
}

MpiEntry* module_entry() {
  static MpiEntry* const entry = open_module();
  return entry;
}

}  // namespace

void check_mpi() {
  (void)module_entry();
  check(started_by_mpi(), kOp,
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
