// What the processes of a job are told: the variables of torchrun, and a few of our own.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include <tandem/parallel/launch/launcher.h>

namespace tandem::parallel {

using Variables = std::vector<std::pair<std::string, std::string>>;

inline constexpr int kMaxRanksPerNode = 4096;

/// Where this node's ranks are among all.
struct Layout {
  int first_rank = 0, world_size = 1;
  std::string run_id = {};
};

/// Throws Error for options that cannot be used; fills in those that have a default. Returns them.
LaunchOptions checked(const std::vector<std::string>& command, LaunchOptions options);
/// Whether the cores have to be divided, and how many threads each rank then gets.
bool divides_cores();
int threads_per_rank(const LaunchOptions& options);
/// The variables of a rank. `options` are checked.
Variables rank_variables(const LaunchOptions& options, const Layout& layout, int local_rank, int restart);
/// The environment of this process with these variables in it, as NAME=value.
std::vector<std::string> environment_with(const Variables& variables);

}  // namespace tandem::parallel
