// The CUDA backend's row in the kernel table.
#pragma once
#include <tandem/tensor/cuda/module.h>

namespace tandem::cuda {

extern const Backend kBackend;
/// What the library does for the module; set when it is opened.
extern const Host* g_host;

}  // namespace tandem::cuda
