// The IDX format of MNIST and its successors: a header with the sizes, then bytes. Raw, or compressed by gzip.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <tandem/tensor/tensor.h>

namespace tandem::data {

/// The uint8 tensor in an IDX file; gzip is recognised by its first two bytes, whatever the name. Memory grows with
/// what the file really holds, never with what its header promises. Throws Error with the path and the byte offset for
/// a file that cannot be read, is no IDX file of unsigned bytes, or is shorter or longer than its header says.
Tensor read_idx(const std::string& path);
/// The same from bytes in memory; `path` is what errors call them.
Tensor read_idx(std::span<const std::uint8_t> bytes, std::string_view path);

}  // namespace tandem::data
