// Random numbers from Philox blocks: a block makes four float32 values, or two of any other type.
#include <algorithm>
#include <cmath>

#include <tandem/tensor/cpu/kernels.h>
#include <tandem/tensor/cpu/loops.h>
#include <tandem/tensor/dispatch.h>

namespace tandem::cpu {
namespace {

template <class T>
constexpr int kPerBlock = std::is_same_v<T, float> ? 4 : 2;

std::uint64_t word(const Philox4& bits, int i) { return (std::uint64_t{bits.x[2 * i + 1]} << 32) | bits.x[2 * i]; }

// Value `i` of a block, uniform in [0, 1) with all the bits that T holds.
template <class T>
T uniform(const Philox4& bits, int i) {
  if constexpr (std::is_same_v<T, float>)
    return static_cast<float>(bits.x[i] >> 8) * 0x1p-24F;
  else
    return static_cast<T>(static_cast<double>(word(bits, i) >> 11) * 0x1p-53);
}

// Values 2i and 2i+1 of a block by Box and Muller's transform.
template <class T>
void normal_pair(const Philox4& bits, int i, T* out) {
  const T u = T(1) - uniform<T>(bits, 2 * i), v = uniform<T>(bits, 2 * i + 1);  // u in (0, 1]
  const T radius = std::sqrt(T(-2) * std::log(u)), angle = T(6.283185307179586476925) * v;
  out[0] = radius * std::cos(angle);
  out[1] = radius * std::sin(angle);
}

}  // namespace

void random(RandomKind kind, double low, double high, const PhiloxKey& key, const View& y) {
  dispatch_number("random", y.dtype, [&]<class T>() {
    constexpr int n = kPerBlock<T>;
    const std::int64_t count = y.numel();
    parallel_for((count + n - 1) / n, 8192, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t b = begin; b < end; ++b) {
        const Philox4 bits = philox(key, static_cast<std::uint64_t>(b));
        T values[n];
        for (int i = 0; i < n; ++i) {
          if (kind == RandomKind::integers) {
            const auto range =
                static_cast<std::uint64_t>(static_cast<std::int64_t>(high) - static_cast<std::int64_t>(low));
            const std::uint64_t r = n == 4 ? std::uint64_t{bits.x[i]} : word(bits, i % 2);
            values[i] = static_cast<T>(static_cast<std::int64_t>(low) + static_cast<std::int64_t>(r % range));
          } else if constexpr (std::is_floating_point_v<T>) {
            if (kind == RandomKind::uniform)
              values[i] = uniform<T>(bits, i);
            else if (kind == RandomKind::keep_mask)
              values[i] = uniform<T>(bits, i) < static_cast<T>(low) ? T(0) : static_cast<T>(1.0 / (1.0 - low));
            else if (i % 2 == 0)
              normal_pair<T>(bits, i / 2, values + i);
          }
        }
        std::copy_n(values, std::min<std::int64_t>(n, count - b * n), y.ptr<T>() + b * n);
      }
    });
  });
}

}  // namespace tandem::cpu
