// Devices, memory and copies of the CUDA backend.
#include <tandem/tests/cuda/cuda_device.h>
#include <tandem/tests/support/test.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <vector>

#include <tandem/autograd/functions.h>
#include <tandem/data/loader.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/cuda.h>
#include <tandem/tensor/cuda/module.h>

namespace tandem {
namespace {

// The tests also run on real devices, of which there may be one.
const Device kFirst = test::cuda_device(0), kSecond = test::cuda_device(1);

TEST_CASE("cuda: devices and their properties") {
  CHECK(cuda::is_available());
  const int count = cuda::device_count();
  if (const char* of_double = std::getenv("TANDEM_CUDA_DOUBLE_DEVICES")) CHECK(count == std::atoi(of_double));
  CHECK(cuda::unavailable_reason().empty());
  const cuda::DeviceProperties p = cuda::properties(kSecond);
  CHECK_FALSE(p.name.empty());
  CHECK(p.total_memory >= p.free_memory);
  const std::string all = fmt::format("cuda:0 to cuda:{}", count - 1);
  CHECK_ERROR(zeros({2}, {.device = "cuda:64"}), "cuda:64 does not exist", all.c_str());
}

TEST_CASE("cuda: copies between host and devices, of any strides and types") {
  const Tensor x = arange(24, {.dtype = float32}).view({2, 3, 4});
  CHECK(x.to(kFirst).device() == kFirst);
  CHECK(x.to(kFirst).to_vector<float>() == x.to_vector<float>());
  const Tensor t = x.transpose(0, 2);
  CHECK(t.to(kFirst).to_vector<float>() == t.to_vector<float>());
  CHECK(x.to(kFirst).transpose(0, 2).to_vector<float>() == t.to_vector<float>());
  CHECK(x.to(kFirst).to(int64).to_vector<int64_t>() == x.to_vector<int64_t>());
  CHECK(x.to(kFirst).to(kSecond).to_vector<float>() == x.to_vector<float>());
  CHECK(x.to(kFirst).transpose(0, 2).to(kSecond).to_vector<float>() == t.to_vector<float>());
  Tensor target = zeros({4, 3, 2}, {.device = kSecond});
  target.transpose(0, 2).copy_(x.to(kFirst));
  CHECK(target.to_vector<float>() == t.contiguous().to_vector<float>());
  Tensor host = zeros({4, 3, 2}, {.dtype = float64});
  host.transpose(0, 2).copy_(x.to(kFirst));
  CHECK(host.to_vector<float>() == t.contiguous().to_vector<float>());
  CHECK(zeros({0, 3}, {.device = kFirst}).to("cpu").shape() == Shape{0, 3});
}

TEST_CASE("cuda: pinned memory") {
  const Tensor x = arange(1000, {.dtype = float32});
  CHECK_FALSE(cuda::is_pinned(x));
  const Tensor pinned = cuda::pin_memory(x);
  CHECK(cuda::is_pinned(pinned));
  CHECK(pinned.to_vector<float>() == x.to_vector<float>());
  CHECK(cuda::pin_memory(pinned).const_data<float>() == pinned.const_data<float>());
  for (int i = 0; i < 20; ++i) {
    Tensor source = cuda::pin_memory(x + static_cast<float>(i));
    const Tensor y = source.to(kFirst, true);
    source = {};  // its block is not given out again while the copy may read it
    const Tensor other = cuda::pin_memory(x * 0);
    CHECK(y.to_vector<float>() == (x + static_cast<float>(i)).to_vector<float>());
  }
}

TEST_CASE("cuda: pinned memory is used again for near sizes, and too much that is unused is given back") {
  const cuda::Module& m = cuda::module("test");
  empty_cache();
  void* const first = m.allocate_pinned(100'000);
  m.release_pinned(first);
  void* const second = m.allocate_pinned(99'000);
  CHECK(second == first);
  m.release_pinned(second);
  const auto held = [&](const std::vector<void*>& blocks) {  // by the allocator, of blocks that are given back to it
    return std::count_if(blocks.begin(), blocks.end(), m.is_pinned);
  };
  constexpr int64_t kLarge = int64_t{64} << 20;  // bytes; the limit is four of these
  std::vector<void*> blocks(4);
  for (void*& block : blocks) block = m.allocate_pinned(kLarge);
  Tensor copied = cuda::pin_memory(zeros({kLarge / 4}));
  const Tensor y = copied.to(kFirst, true);
  blocks.push_back(copied.raw().data);
  copied = {};
  for (int i = 0; i < 4; ++i)
    m.release_pinned(blocks[static_cast<std::size_t>(i)]);  // the oldest is still being copied
  CHECK(held(blocks) == 4);
  CHECK_FALSE(m.is_pinned(blocks.back()));
  CHECK(sum(y).item<float>() == 0);
  empty_cache();
  CHECK(held(blocks) == 0);
}

TEST_CASE("cuda: a loader's batches are pinned, whoever makes them, and their copies go on beside the loader") {
  const Tensor numbers = arange(1000, {.dtype = float32}), labels = arange(1000);
  for (const int workers : {0, 1, 2}) {
    data::DataLoader loader(data::TensorDataset(numbers, labels),
                            {.batch_size = 7, .num_workers = workers, .pin_memory = true});
    std::vector<Tensor> seen;
    for (auto& [x, y] : loader) {
      CHECK(cuda::is_pinned(x));
      CHECK(cuda::is_pinned(y));
      seen.push_back(x.to(kFirst, true) - y.to(kFirst, true));
    }
    CHECK(seen.size() == 143);
    for (const Tensor& difference : seen) CHECK(sum(abs(difference)).item<float>() == 0);
  }
  for (auto& [x] : data::DataLoader(data::TensorDataset(numbers.to(kFirst)), {.batch_size = 500, .pin_memory = true}))
    CHECK(x.device() == kFirst);  // what lies on a device stays there
}

TEST_CASE("cuda: counted numbers, unit matrices and one-hot labels have the CPU's bits") {
  const auto same = [](auto&& make) {
    const Tensor on_device = make(TensorOptions{.device = kSecond}), on_host = make(TensorOptions{});
    CHECK(on_device.device() == kSecond);
    CHECK(equal(on_device.to("cpu"), on_host));
  };
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const DType dtype : {boolean, uint8, int32, int64, float16, bfloat16, float32, float64}) {
    CAPTURE(dtype);
    const auto with_type = [dtype](TensorOptions options) {
      options.dtype = dtype;
      return options;
    };
    same([&](const TensorOptions& o) { return arange(100, with_type(o)); });
    same([&](const TensorOptions& o) { return arange(0, 30, 0.1, with_type(o)); });
    for (const int n : {0, 1, 2, 9}) same([&](const TensorOptions& o) { return eye(n, with_type(o)); });
  }
  same([](const TensorOptions& o) { return arange(7, -20, -4, o); });
  same([](const TensorOptions& o) { return arange(0.7, -3.1, -0.013, o); });
  same([](const TensorOptions& o) { return arange(-kMost, kMost, kMost / 3, o); });
  same([](const TensorOptions& o) { return arange(5, 5, 1, o); });
  same([](const TensorOptions& o) { return one_hot(tensor({3, 0, 2, 2}, {.device = o.device}), 4); });
  CHECK(eye(2, {.device = kFirst, .requires_grad = true}).requires_grad());
}

TEST_CASE("cuda: pointwise operations") {
  const Tensor x = randn({5, 7}), y = randn({7});
  const Tensor on_device = (x.to(kFirst) * 2 + y.to(kFirst)) / exp(y.to(kFirst));
  CHECK_CLOSE(on_device.to("cpu"), (x * 2 + y) / exp(y), 1e-6);
}

TEST_CASE("cuda: tensors of different devices are an error that names the function and both devices") {
  const Tensor a = ones({2, 2}, {.device = kFirst}), b = ones({2, 2});
  const std::string both = fmt::format("tensors are on different devices: {} and cpu:0; move one with .to", kFirst);
  const auto refused = [&](const std::string& op, auto&& body) {
    const std::string named = "[" + op + "] ";
    CHECK_ERROR(body(), named.c_str(), both.c_str());
  };
  refused("allclose", [&] { (void)allclose(a, b); });
  refused("allclose", [&] { (void)allclose(a, ones({3})); });
  refused("equal", [&] { (void)equal(a, b); });
  refused("stack", [&] { stack({a, b}); });
  refused("cat", [&] { cat({a, b}); });
  refused("mse_loss", [&] { mse_loss(a, b); });
  refused("add", [&] { a + b; });
  refused("where", [&] { where(a > 0, a, b); });
  refused("linear", [&] { linear(a, b); });
}

TEST_CASE("cuda: memory statistics and running out") {
  const MemoryStats before = memory_stats(kSecond);
  {
    const Tensor x = zeros({1000, 1000}, {.device = kSecond});
    CHECK(memory_stats(kSecond).in_use == before.in_use + 4'000'000);
    CHECK(memory_stats(kSecond).reserved >= 4'000'000);
  }
  CHECK(memory_stats(kSecond).in_use == before.in_use);
  CHECK(memory_stats(kSecond).peak >= before.in_use + 4'000'000);
  const std::string asked = fmt::format("out of memory on {}: 4398046511104 bytes were asked for", kSecond);
  CHECK_ERROR(empty({int64_t{1} << 40}, {.device = kSecond}), asked.c_str(), "smaller batch");
  CHECK(zeros({3}, {.device = kSecond}).to_vector<float>() == std::vector<float>(3));  // and goes on working
  empty_cache();
}

}  // namespace
}  // namespace tandem
