// Random numbers on CUDA are the CPU's.
#include <tandem/tests/cuda/cuda_device.h>
#include <tandem/tests/support/test.h>

#include <tandem/nn/layers.h>
#include <tandem/tensor/random.h>

namespace tandem::test {
namespace {

// The same draw on both kinds of device, from the same place in the stream.
template <class Draw>
std::pair<Tensor, Tensor> both(Draw draw) {
  manual_seed(17);
  (void)rand({5});
  const Tensor host = draw(Device());
  CHECK(host.device().is_cpu());
  manual_seed(17);
  (void)rand({5});
  return {host, draw(kCuda).to("cpu")};
}

}  // namespace

TEST_CASE("cuda: uniform numbers, integers and masks have the CPU's bits") {
  for (const int64_t n : {0, 1, 3, 4, 5, 1003}) {
    for (const DType dtype : {float32, float64}) {
      const auto [u, v] = both([&](Device device) { return rand({n}, {.dtype = dtype, .device = device}); });
      CHECK(equal(u, v));
      const auto [a, b] =
          both([&](Device device) { return dropout(ones({n}, {.dtype = dtype, .device = device}), 0.3, true); });
      CHECK(equal(a, b));
    }
    for (const DType dtype : {int64, int32, uint8, float32}) {
      const auto [i, j] = both([&](Device device) { return randint(3, 200, {n}, {.dtype = dtype, .device = device}); });
      CHECK(equal(i, j));
    }
  }
}

TEST_CASE("cuda: normal numbers") {
  for (const DType dtype : {float32, float64}) {
    const auto [x, y] = both([&](Device device) { return randn({1001}, {.dtype = dtype, .device = device}); });
    CHECK_CLOSE(x, y, dtype == float32 ? 1e-6 : 1e-14);
  }
}

TEST_CASE("cuda: dropout scales forward and backward by one mask") {
  manual_seed(3);
  Tensor x = randn({40, 50}, {.device = kCuda}).requires_grad_();
  nn::Dropout layer(0.4);
  const Tensor y = layer(x);
  y.backward(ones_like(y));
  CHECK_CLOSE(y.to("cpu"), (x.detach() * x.grad()).to("cpu"), 1e-6);
  const double kept = mean((x.grad() > 0).to(float32)).item<double>();
  CHECK(kept > 0.5);
  CHECK(kept < 0.7);
}

}  // namespace tandem::test
