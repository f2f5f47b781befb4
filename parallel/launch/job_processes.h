// The processes of a job on this host, found by a variable that all of them inherit, whatever group or session they are
// in.
#pragma once
#include <string>

namespace tandem::parallel {

/// A variable that has a random value in the ranks of one launcher.
inline constexpr const char* kLauncherIdVariable = "TANDEM_LAUNCHER_ID";

/// Kills the processes that were started with this entry, NAME=value, in their environment, until none is left.
void kill_processes_with(const std::string& entry);

}  // namespace tandem::parallel
