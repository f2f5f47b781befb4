// Files of named tensors in the safetensors format, which Python's package of that name reads and writes.
#pragma once
#include <cstddef>
#include <map>
#include <span>
#include <string>

#include <tandem/tensor/io/state.h>

namespace tandem {

/// What a safetensors file holds.
struct Safetensors {
  NamedTensors tensors;  // in the order of the file's header
  std::map<std::string, std::string> metadata;
};

/// Writes tensors of any type, shape and device. A file of that name is replaced as a whole or, when writing fails,
/// left as it was. Throws Error naming path and reason.
void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {});
/// Reads all tensors to `device`. Throws Error with the path and the byte offset when the file is short, corrupt or
/// hostile; no more memory is taken than the file has data.
Safetensors read_safetensors(const std::string& path, Device device = {});
/// The same for a file in memory; `name` stands for its path in errors.
Safetensors parse_safetensors(std::span<const std::byte> bytes, const std::string& name = "memory");

}  // namespace tandem
