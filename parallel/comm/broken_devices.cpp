#include <tandem/parallel/comm/broken_devices.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include <tandem/tensor/cuda/module.h>

namespace tandem::parallel {
namespace {

struct Reports {
  std::mutex mutex;
  std::vector<std::pair<int, std::exception_ptr>> waiting;  // by device
  std::atomic<bool> any{false};
};
Reports& reports() {
  static auto* const all = new Reports();  // devices are waited for until the very end
  return *all;
}

void after_synchronize(int device) {
  Reports& r = reports();
  if (!r.any) return;
  std::exception_ptr error;
  {
    const std::lock_guard lock(r.mutex);
    const auto found = std::ranges::find(r.waiting, device, [](const auto& report) { return report.first; });
    if (found == r.waiting.end()) return;
    error = std::move(found->second);
    r.waiting.erase(found);
    r.any = !r.waiting.empty();
  }
  std::rethrow_exception(error);
}

}  // namespace

void report_broken(Device device, const std::exception_ptr& error) {
  Reports& r = reports();
  const std::lock_guard lock(r.mutex);
  r.waiting.emplace_back(device.index(), error);
  r.any = true;
  cuda::module("nccl").set_synchronize_hook(after_synchronize);
}

void forget_broken(Device device, const std::exception_ptr& error) {
  Reports& r = reports();
  if (!r.any) return;
  const std::lock_guard lock(r.mutex);
  std::erase(r.waiting, std::pair(device.index(), error));
  r.any = !r.waiting.empty();
}

}  // namespace tandem::parallel
