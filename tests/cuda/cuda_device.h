// The devices of tests that want two, and run on the real ones as well as on the double's.
#pragma once
#include <algorithm>

#include <tandem/tensor/device.h>

namespace tandem::test {

inline const Device kCuda{DeviceType::cuda, 0};

/// cuda:i, or the last that there is.
inline Device cuda_device(int i) { return {DeviceType::cuda, std::min(i, std::max(cuda::device_count() - 1, 0))}; }

}  // namespace tandem::test
