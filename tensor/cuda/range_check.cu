// Whether labels and indices lie in their range.
#include <tandem/tensor/cuda/device_error.h>
#include <tandem/tensor/cuda/kernels.h>
#include <tandem/tensor/cuda/places.h>

namespace tandem::cuda {
namespace {

struct CheckRange {
  Places<1> places;
  RangeCheck check;
  DeviceError* error;
  TANDEM_DEVICE void operator()(std::int64_t i) const {
    char* at[1];
    places.at(i, at);
    const auto number = value_at<std::int64_t>(at[0]);
    if (!check.good(number)) note_error(error, check, number, i);
  }
};

}  // namespace

void check_range(const RangeCheck& check, const View& numbers) {
  const cudaStream_t stream = use(numbers.device);
  for_each_index(stream, numbers.numel(), CheckRange{places<1>({&numbers}), check, device_error(numbers.device)});
}

}  // namespace tandem::cuda
