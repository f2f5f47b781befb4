// Random numbers: those of the CPU, whose uniform values and integers are the same bits, and normals to rounding.
#include <tandem/tensor/cuda/backend.h>
#include <tandem/tensor/cuda/capture.h>
#include <tandem/tensor/cuda/kernels.h>
#include <tandem/tensor/cuda/launch.h>
#include <tandem/tensor/dispatch.h>
#include <tandem/tensor/random_values.h>

namespace tandem::cuda {
namespace {

// A thread makes the values of one block.
template <class T>
struct Random {
  RandomKind kind;
  double low, high;
  PhiloxKey key;
  const PhiloxKey* live;  // in a graph, where each replay finds its key; else null
  std::int64_t count;
  T* y;
  TANDEM_DEVICE void operator()(std::int64_t block) const {
    constexpr int n = kPerBlock<T>;
    T values[n] = {};
    random_values<T>(kind, low, high, philox(live != nullptr ? *live : key, static_cast<std::uint64_t>(block)), values);
    for (int i = 0; i < n; ++i)
      if (block * n + i < count) y[block * n + i] = values[i];
  }
};

struct DrawAgain {
  UniqueFunction<PhiloxKey()> draw;
  void operator()(void* host) const { *static_cast<PhiloxKey*>(host) = draw(); }
};

}  // namespace

void random(RandomKind kind, double low, double high, const PhiloxKey& key, const View& y) {
  const cudaStream_t stream = use(y.device);
  dispatch_number("random", y.dtype, [&]<class T>() {
    const std::int64_t count = y.numel(), blocks = (count + kPerBlock<T> - 1) / kPerBlock<T>;
    Random<T> body{kind, low, high, key, nullptr, count, y.ptr<T>()};
    if (capturing(y.device))
      body.live = static_cast<const PhiloxKey*>(
          slot(y.device, sizeof(PhiloxKey), DrawAgain{g_host->repeat_draw(key, static_cast<std::uint64_t>(blocks))}));
    for_each_index(stream, blocks, body);
  });
}

}  // namespace tandem::cuda
