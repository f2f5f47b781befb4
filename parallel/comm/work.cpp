#include <tandem/parallel/comm/work.h>

namespace tandem::parallel {
std::exception_ptr Work::exception() const {
  if (!is_completed()) return nullptr;
  try {
    wait();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace tandem::parallel
