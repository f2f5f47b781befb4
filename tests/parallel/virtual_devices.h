// What the tests of DataParallel share: virtual CPU devices for a while, and small models.
#pragma once
#include <memory>
#include <vector>

#include <tandem/tandem.h>
#include <tandem/tests/support/test.h>

namespace tandem::test {

/// Another number of CPU devices until it is destroyed.
struct Devices {
  explicit Devices(int count) : before(device_count(DeviceType::cpu)) { set_cpu_device_count(count); }
  ~Devices() { set_cpu_device_count(before); }
  Devices(const Devices&) = delete;
  Devices& operator=(const Devices&) = delete;
  int before;
};

/// Another number of threads until it is destroyed.
struct Threads {
  explicit Threads(int count) : before(num_threads()) { set_num_threads(count); }
  ~Threads() { set_num_threads(before); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
  int before;
};

/// Linear(6, 16), ReLU, Linear(16, 4), always with the same weights.
inline std::shared_ptr<nn::SequentialImpl> make_net(DType dtype = float64) {
  manual_seed(7);
  auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(6, 16), nn::ReLU(), nn::Linear(16, 4));
  net->to(dtype);
  return net;
}

inline void check_equal_weights(const std::vector<Tensor>& a, const std::vector<Tensor>& b, double tolerance = 1e-10) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) CHECK_CLOSE(a[i].detach(), b[i].detach(), tolerance);
}

inline void check_same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) CHECK(equal(a[i].detach(), b[i].detach()));
}

}  // namespace tandem::test
