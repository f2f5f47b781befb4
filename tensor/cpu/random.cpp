// Random numbers from Philox blocks.
#include <algorithm>

#include <tandem/tensor/cpu/kernels.h>
#include <tandem/tensor/cpu/loops.h>
#include <tandem/tensor/dispatch.h>
#include <tandem/tensor/random_values.h>

namespace tandem::cpu {

void random(RandomKind kind, double low, double high, const PhiloxKey& key, const View& y) {
  dispatch_number("random", y.dtype, [&]<class T>() {
    constexpr int n = kPerBlock<T>;
    const std::int64_t count = y.numel();
    parallel_for((count + n - 1) / n, 8192, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t b = begin; b < end; ++b) {
        T values[n];
        random_values<T>(kind, low, high, philox(key, static_cast<std::uint64_t>(b)), values);
        std::copy_n(values, std::min<std::int64_t>(n, count - b * n), y.ptr<T>() + b * n);
      }
    });
  });
}

}  // namespace tandem::cpu
