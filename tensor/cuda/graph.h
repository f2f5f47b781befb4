// Capture and replay of the work of one device; see CapturedGraph.
#pragma once
#include <memory>

#include <tandem/tensor/cuda/module.h>

namespace tandem::cuda {

std::unique_ptr<CapturedGraph> begin_capture(int device);
void at_replay(UniqueFunction<void()> check_it);

}  // namespace tandem::cuda
