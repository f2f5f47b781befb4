// What libtandem and its module libtandem_mpi.so have in common.
#pragma once
#include <tandem/parallel/comm/mesh.h>

namespace tandem::parallel {

inline constexpr const char* kMpiModule = "libtandem_mpi.so";
/// Names another file to take for the module.
inline constexpr const char* kMpiModuleVariable = "TANDEM_MPI_MODULE";
/// The name of the module's function, which changes when Mesh, GroupSetup, Store or what they hold change.
inline constexpr const char* kMpiEntry = "tandem_make_mpi_mesh_1";
/// Makes a mesh that the caller owns. Error when MPI does not serve several threads, or knows this process as another
/// rank; CommError when a rank does not come.
using MpiEntry = Mesh*(const GroupSetup& setup, int rank);

}  // namespace tandem::parallel
