// The bucket plan.
#include <tandem/parallel/bucket.h>
#include <tandem/tests/support/test.h>

using namespace tandem;

namespace {

using Plan = std::vector<std::vector<std::size_t>>;

std::vector<parallel::BucketItem> floats(std::initializer_list<std::int64_t> counts) {
  std::vector<parallel::BucketItem> items;
  for (const std::int64_t n : counts) items.push_back({4 * n, float32});
  return items;
}

std::vector<parallel::BucketItem> alternating() {
  std::vector<parallel::BucketItem> items;
  for (int i = 0; i < 3; ++i) {
    items.push_back({50 * 4, float32});
    items.push_back({25 * 8, float64});
  }
  return items;
}

Plan plan(const std::vector<parallel::BucketItem>& items, std::initializer_list<std::int64_t> caps) {
  return parallel::plan_buckets(items, std::span(caps.begin(), caps.size()));
}

}  // namespace

TEST_CASE("a bucket is closed once its size reaches the cap") {
  CHECK(plan(floats({100, 200, 100, 50}), {400}) == Plan{{0}, {1}, {2}, {3}});
  CHECK(plan(floats({10, 10, 10, 10}), {40, 80}) == Plan{{0}, {1, 2}, {3}});
  CHECK(plan(floats({1, 1, 1}), {1000}) == Plan{{0, 1, 2}});
  CHECK(plan(floats({1000, 1}), {8}) == Plan{{0}, {1}});
  CHECK(plan({}, {8}) == Plan{});
}

TEST_CASE("a bucket holds one dtype, and each dtype uses the caps in order") {
  CHECK(plan(alternating(), {400}) == Plan{{0, 2}, {1, 3}, {4}, {5}});
  CHECK(plan(alternating(), {200, 400}) == Plan{{0}, {1}, {2, 4}, {3, 5}});
}

TEST_CASE("a bucket holds one device") {
  std::vector<parallel::BucketItem> items = floats({1, 1, 1});
  items[1].device = Device("cpu:1");
  CHECK(plan(items, {1000}) == Plan{{1}, {0, 2}});
}

TEST_CASE("buckets come in the order in which they are complete") {
  std::vector<parallel::BucketItem> items = floats({1, 1, 1});
  items.insert(items.begin(), {8, float64});
  items.push_back({8, float64});
  CHECK(plan(items, {1000}) == Plan{{1, 2, 3}, {0, 4}});
}

// The MLP 784-512-512-10 in the order in which its gradients become ready.
TEST_CASE("the default caps give the MLP two buckets") {
  const auto items = floats({10, 10 * 512, 512, 512 * 512, 512, 512 * 784});
  const Plan buckets = plan(items, {1 << 20, 25 << 20});
  REQUIRE(buckets == Plan{{0, 1, 2, 3}, {4, 5}});
  auto bytes = [&](const std::vector<std::size_t>& bucket) {
    std::int64_t sum = 0;
    for (const std::size_t i : bucket) sum += items[i].bytes;
    return sum;
  };
  CHECK(bytes(buckets[0]) == 1'071'144);
  CHECK(bytes(buckets[1]) == 1'607'680);
}

TEST_CASE("caps that make no sense are errors") {
  CHECK_ERROR(plan(floats({1}), {}), "there is no cap");
  CHECK_ERROR(plan(floats({1}), {4, 0}), "a bucket of 0 bytes");
}
