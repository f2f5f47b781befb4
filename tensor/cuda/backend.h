// The CUDA backend's row in the kernel table.
#pragma once
#include <tandem/tensor/backend.h>

namespace tandem::cuda {

extern const Backend kBackend;
/// The library's table for the host's part of copies between host and device; set when the module is opened.
extern const Backend* g_cpu;

}  // namespace tandem::cuda
