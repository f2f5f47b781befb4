// Devices, virtual CPU devices, their memory and their threads.
#include <tandem/tests/support/test.h>

#include <atomic>
#include <thread>

#include <tandem/tensor/random.h>
#include <tandem/tensor/thread_context.h>
#include <tandem/tensor/threads.h>

#if defined(__SANITIZE_ADDRESS__)
// A request that cannot be met gives null, as it does without the sanitizer.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
#endif

namespace tandem::test {

TEST_CASE("device: reading and writing names") {
  CHECK(Device("cpu") == Device(DeviceType::cpu, 0));
  CHECK(Device("cpu:3").index() == 3);
  CHECK(Device("cuda").is_cuda());
  CHECK(Device("cuda:1").str() == "cuda:1");
  CHECK(Device().str() == "cpu:0");
  for (const char* text : {"", "gpu", "cpu:", "cpu:-1", "cpu:x", "cpu:1x", ":1", "cuda:99999", "CPU"})
    CHECK_ERROR(Device(text), "[Device]", "is not a device", "\"cpu:1\"");
  const DeviceIds ids{"cpu:0", "cpu:1"}, numbers{0, 1};
  CHECK(ids.size() == 2);
  CHECK(numbers.begin()[1].resolve(DeviceType::cuda) == Device("cuda:1"));
  CHECK(ids.begin()[1].resolve(DeviceType::cuda) == Device("cpu:1"));
}

TEST_CASE("device: virtual CPU devices come and go") {
  set_cpu_device_count(1);
  CHECK(device_count(DeviceType::cpu) == 1);
  CHECK_ERROR(zeros({1}, {.device = "cpu:1"}), "[empty]", "cpu:1 does not exist", "set_cpu_device_count(2)");
  CHECK_ERROR(zeros({1}).to("cpu:1"), "cpu:1 does not exist");
  CHECK_ERROR(zeros({1}, {.device = Device(DeviceType::cpu, -1)}), "does not exist");
  CHECK_ERROR(zeros({1}, {.device = "cuda"}), "cuda:0 does not exist", "use \"cpu\"");
  CHECK(cuda::device_count() == 0);
  CHECK_FALSE(cuda::is_available());
  set_cpu_device_count(3);
  const Tensor x = tensor({1.0, 2.0}).to("cpu:2");
  CHECK(x.device() == Device("cpu:2"));
  CHECK((x * 2).device() == Device("cpu:2"));
  CHECK(x.to("cpu:2").identity() == x.identity());
  CHECK(x.to("cpu:0").to_vector<double>() == std::vector<double>{1, 2});
  CHECK(x[0].item<int>() == 1);
  CHECK(sum(x.unsqueeze(0).expand({2, 2}).t()).item<double>() == 6);
  CHECK_ERROR(set_cpu_device_count(0), "[set_cpu_device_count]", "0 devices", "1 to 64");
  CHECK_ERROR(set_cpu_device_count(65), "65 devices");
  CHECK(device_count(DeviceType::cpu) == 3);
  set_cpu_device_count(1);
}

TEST_CASE("memory: counted, reused and returned") {
  set_cpu_device_count(2);
  const Device device("cpu:1");
  empty_cache();
  const MemoryStats before = memory_stats(device);
  CHECK(before.reserved == before.in_use);
  [[maybe_unused]] const void* address = nullptr;  // not checked under sanitizers, which get no cache
  {
    const Tensor x = empty({1000}, {.device = device});
    const MemoryStats with = memory_stats(device);
    CHECK(with.in_use >= before.in_use + 4000);
    CHECK(with.in_use <= before.in_use + 4500);  // at most an eighth is wasted
    CHECK(with.peak >= with.in_use);
    address = x.const_data<float>();
    CHECK(memory_stats("cpu:0").in_use == memory_stats().in_use);
  }
  CHECK(memory_stats(device).in_use == before.in_use);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  CHECK(memory_stats(device).reserved > before.reserved);
  CHECK(empty({1001}, {.device = device}).const_data<float>() == address);  // the same size class
#endif
  reset_peak_memory(device);
  CHECK(memory_stats(device).peak == memory_stats(device).in_use);
  empty_cache();
  CHECK(memory_stats(device).reserved == memory_stats(device).in_use);
  set_cpu_device_count(1);
}

TEST_CASE("memory: every size is usable and aligned") {
  for (int64_t bytes = 0; bytes < 5000; bytes += 7) {
    Tensor x = zeros({bytes}, {.dtype = uint8});
    CHECK(reinterpret_cast<std::uintptr_t>(x.const_data<std::uint8_t>()) % 64 == 0);
    x.fill_(1);
    CHECK(sum(x).item<int64_t>() == bytes);
  }
}

TEST_CASE("memory: too much is an error that says so, and what was there stays") {
  const Tensor x = ones({4});
  CHECK_ERROR(empty({int64_t{1} << 55}), "[allocate]", "out of memory on cpu:0", "144115188075855872 bytes", "in use",
              "smaller batch");
  CHECK_ERROR(empty({int64_t{1} << 59}, {.dtype = float64}), "[allocate]", "out of memory");
  CHECK(equal(x, ones({4})));
}

TEST_CASE("threads: how many") {
  const int before = num_threads();
  set_num_threads(6);
  CHECK(num_threads() == 6);
  CHECK(threads_per_device() == 6);
  set_cpu_device_count(4);
  CHECK(threads_per_device() == 1);
  set_cpu_device_count(3);
  CHECK(threads_per_device() == 2);
  set_cpu_device_count(1);
  CHECK_ERROR(set_num_threads(0), "[set_num_threads]", "0 threads", "1 to 1024");
  CHECK(num_threads() == 6);
  set_num_threads(before);
}

TEST_CASE("threads: parallel_for covers the range once, in whole grains") {
  const int before = num_threads();
  for (const int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    for (const int64_t n : {0, 1, 5, 100, 1000})
      for (const int64_t grain : {1, 7, 100, 5000}) {
        std::vector<std::atomic<int>> hits(static_cast<std::size_t>(n));
        std::atomic<bool> whole{true};
        parallel_for(n, grain, [&](int64_t begin, int64_t end) {
          if (begin % grain != 0 || (end % grain != 0 && end != n)) whole = false;
          for (int64_t i = begin; i < end; ++i) ++hits[static_cast<std::size_t>(i)];
        });
        CHECK(whole);
        for (const auto& h : hits) REQUIRE(h == 1);
      }
  }
  set_num_threads(before);
}

TEST_CASE("run_on_devices: all at the same time, the caller's context in each") {
  const std::vector<Device> devices{"cpu:0", "cpu:1", "cpu:2"};
  std::atomic<int> arrived{0};
  std::vector<int> streams(3, -1), replicas(3, -1);
  const int owner = 0;
  const ReplicaScope replica(&owner, 5);
  const RandomStream stream(7);
  run_on_devices(devices, [&](int i) {
    ++arrived;
    while (arrived < 3) std::this_thread::yield();  // none waits for another to finish
    streams[static_cast<std::size_t>(i)] = RandomStream::current();
    replicas[static_cast<std::size_t>(i)] = ReplicaScope::owner() == &owner ? ReplicaScope::index() : -1;
    t_thread_context.random_stream = 100 + i;  // stays in the body, save on the caller's thread
  });
  CHECK(streams == std::vector<int>{7, 7, 7});
  CHECK(replicas == std::vector<int>{5, 5, 5});
  t_thread_context.random_stream = 7;
  run_on_devices(devices, [&](int i) { streams[static_cast<std::size_t>(i)] = RandomStream::current(); });
  CHECK(streams == std::vector<int>{7, 7, 7});
  run_on_devices({}, [](int) { FAIL("there is no device"); });
}

TEST_CASE("run_on_devices: nested, and the exception of the smallest index") {
  const std::vector<Device> devices{"cpu:0", "cpu:1", "cpu:2"};
  std::atomic<int> count{0};
  run_on_devices(devices, [&](int) { run_on_devices(devices, [&](int) { ++count; }); });
  CHECK(count == 9);
  for (int smallest = 0; smallest < 3; ++smallest) {
    auto body = [&](int i) {
      if (i >= smallest) fail("body", "failed in {}", i);
    };
    const std::string expected = "failed in " + std::to_string(smallest);
    CHECK_ERROR(run_on_devices(devices, body), expected.c_str());
  }
  run_on_devices(devices, [&](int) { ++count; });
  CHECK(count == 12);
}

}  // namespace tandem::test
