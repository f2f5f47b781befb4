// Nothing captures yet: every kernel is launched at once, with its values as arguments.
#include <tandem/tensor/cuda/capture.h>

#include <tandem/tensor/error.h>

namespace tandem::cuda {

bool capturing(Device) { return false; }

void* slot(Device device, std::size_t, UniqueFunction<void(void*)>) {
  fail("capture", "no graph is being captured on {}", device);
}

}  // namespace tandem::cuda
