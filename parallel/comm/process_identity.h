// Which process a number stands for: numbers are used again, together with the time of the start they are not.
#pragma once
#include <sys/types.h>

#include <string>

namespace tandem::parallel {

/// "<number> <time of its start>"; empty when the process has ended.
std::string identity_of(pid_t process);
/// Whether the process of an identity is still there.
bool is_running(const std::string& identity);

}  // namespace tandem::parallel
