// A file in the folder for temporary ones, for all ranks of a test.
#pragma once
#include <unistd.h>

#include <filesystem>

#include <tandem/tests/parallel/ddp_cases.h>

namespace tandem::test {

/// A path that is the same on all ranks, and no other job's.
inline std::string file_of(const Group& group, const char* name) {
  Tensor id = full({1}, static_cast<std::int64_t>(getpid()), {.dtype = int64});
  group->broadcast(id, 0).wait();
  const std::string file = fmt::format("tandem_{}_{}", id.item<std::int64_t>(), name);
  return (std::filesystem::temp_directory_path() / file).string();
}

}  // namespace tandem::test
