// Opening a module of the library: a shared object that is only needed, and only opened, when what it knows is asked
// for.
#pragma once
#include <string>

namespace tandem {

/// The function `entry` of the module in `file`, which is beside the library, or the program where that is linked
/// statically, or where the system looks for libraries, or where the environment's `variable` says. Null with the
/// reason.
void* open_module(const char* file, const char* variable, const char* entry, std::string& reason);

}  // namespace tandem
