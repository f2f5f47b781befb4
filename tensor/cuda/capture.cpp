#include <tandem/tensor/cuda/capture.h>

#include <tandem/tensor/cuda/allocator.h>
#include <tandem/tensor/error.h>

namespace tandem::cuda {
namespace {

thread_local constinit Capture* t_capture = nullptr;

}  // namespace

Capture* current_capture() { return t_capture; }
void set_current_capture(Capture* capture) { t_capture = capture; }

bool capturing(Device device) { return t_capture != nullptr && t_capture->device == device; }

void* slot(Device device, std::size_t bytes, UniqueFunction<void(void*)> refresh) {
  check(capturing(device), "Graph", "no graph is being captured on {}", device);
  void* const data = t_capture->slots.add(bytes, std::move(refresh));
  check(data != nullptr, "Graph", "out of memory on {}: {} bytes were asked for what changes from replay to replay",
        device, bytes);
  return data;
}

void check_no_capture(std::string_view op, std::string_view problem) { check(t_capture == nullptr, op, "{}", problem); }

FreeOfCapture::FreeOfCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
FreeOfCapture::~FreeOfCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

}  // namespace tandem::cuda
