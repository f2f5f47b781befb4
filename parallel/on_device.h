// A tensor as seen from another device.
#pragma once
#include <tandem/tensor/tensor.h>

namespace tandem::parallel {

/// Whether both devices work on the same memory, as all CPU devices do.
bool share_memory(Device a, Device b);
/// The tensor's values on a device; differentiable. The same memory where both devices share it, else a copy.
Tensor on_device(const Tensor& t, Device device);

}  // namespace tandem::parallel
