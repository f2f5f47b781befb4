// Samplers: what each visits, in which order, and what is an error.
#include <tandem/data/sampler.h>

#include <algorithm>
#include <set>

#include <tandem/tensor/random.h>
#include <tandem/tests/support/test.h>

namespace tandem {
namespace {

using data::DistributedMode;
using data::DistributedSampler;
using data::RandomSampler;
using data::SequentialSampler;
using Rows = std::vector<int64_t>;

Rows sorted(Rows rows) {
  std::sort(rows.begin(), rows.end());
  return rows;
}
Rows count_to(int64_t n) { return SequentialSampler(n).rows(); }

TEST_CASE("sampler: sequential") {
  CHECK(SequentialSampler(4).order(3) == Rows{0, 1, 2, 3});
  CHECK(SequentialSampler(0).rows().empty());
  CHECK(SequentialSampler(4).size() == 4);
}

TEST_CASE("sampler: random orders are permutations that depend on seed and epoch only") {
  const RandomSampler a(100, 7);
  CHECK(sorted(a.order(0)) == count_to(100));
  CHECK(a.order(0) != count_to(100));
  CHECK(a.order(0) != a.order(1));
  CHECK(a.order(0) != RandomSampler(100, 8).order(0));
  const Rows before = a.order(5);
  manual_seed(123);
  (void)rand({10});
  CHECK(RandomSampler(100, 7).order(5) == before);
  manual_seed(1);
  const Tensor first = rand({4});
  manual_seed(1);
  (void)a.order(0);  // leaves the global numbers alone
  CHECK(rand({4}).to_vector<float>() == first.to_vector<float>());
  CHECK(RandomSampler(0).rows().empty());
  CHECK(RandomSampler(1).rows() == Rows{0});
}

TEST_CASE("sampler: random orders are uniform") {
  // Each of the 24 orders of four rows, 2400 times: chi-squared with 23 degrees of freedom, 49.7 is the 0.1 % point.
  std::vector<int> counts(256);
  const RandomSampler sampler(4, 3);
  for (int64_t epoch = 0; epoch < 2400; ++epoch) {
    const Rows rows = sampler.order(epoch);
    ++counts[static_cast<std::size_t>(rows[0] * 64 + rows[1] * 16 + rows[2] * 4 + rows[3])];
  }
  double chi_squared = 0;
  int orders = 0;
  for (const int count : counts) {
    if (count == 0) continue;
    ++orders;
    chi_squared += (count - 100.0) * (count - 100.0) / 100.0;
  }
  CHECK(orders == 24);
  CHECK(chi_squared < 49.7);
}

TEST_CASE("sampler: the epoch is kept and moves the order") {
  RandomSampler sampler(50, 1);
  CHECK(sampler.epoch() == 0);
  CHECK(sampler.rows() == sampler.order(0));
  sampler.set_epoch(4);
  CHECK(sampler.epoch() == 4);
  CHECK(sampler.rows() == sampler.order(4));
  CHECK_ERROR(sampler.set_epoch(-1), "[set_epoch] epoch -1 is negative", "count from 0");
  CHECK(sampler.epoch() == 4);
}

TEST_CASE("sampler: distributed modes pad, drop and exact") {
  const auto parts = [](int64_t size, int64_t replicas, DistributedMode mode, bool shuffle) {
    std::vector<Rows> all;
    for (int64_t rank = 0; rank < replicas; ++rank) {
      const DistributedSampler sampler(
          size, {.num_replicas = replicas, .rank = rank, .shuffle = shuffle, .seed = 2, .mode = mode});
      all.push_back(sampler.order(1));
      CHECK(sampler.size() == static_cast<int64_t>(all.back().size()));
    }
    return all;
  };
  CHECK(parts(7, 3, DistributedMode::pad, false) == std::vector<Rows>{{0, 3, 6}, {1, 4, 0}, {2, 5, 1}});
  CHECK(parts(7, 3, DistributedMode::drop, false) == std::vector<Rows>{{0, 3}, {1, 4}, {2, 5}});
  CHECK(parts(7, 3, DistributedMode::exact, false) == std::vector<Rows>{{0, 3, 6}, {1, 4}, {2, 5}});
  CHECK(parts(1, 3, DistributedMode::pad, false) == std::vector<Rows>{{0}, {0}, {0}});
  CHECK(parts(1, 3, DistributedMode::drop, false) == std::vector<Rows>{{}, {}, {}});
  CHECK(parts(1, 3, DistributedMode::exact, false) == std::vector<Rows>{{0}, {}, {}});
  CHECK(parts(0, 2, DistributedMode::pad, true) == std::vector<Rows>{{}, {}});

  for (int64_t size = 0; size < 40; ++size) {
    for (int64_t replicas = 1; replicas < 9; ++replicas) {
      Rows exact, drop;
      std::set<int64_t> pad;
      for (const Rows& part : parts(size, replicas, DistributedMode::exact, true)) {
        CHECK(static_cast<int64_t>(part.size()) >= size / replicas);
        CHECK(static_cast<int64_t>(part.size()) <= (size + replicas - 1) / replicas);
        exact.insert(exact.end(), part.begin(), part.end());
      }
      CHECK(sorted(exact) == count_to(size));
      for (const Rows& part : parts(size, replicas, DistributedMode::drop, true)) {
        CHECK(static_cast<int64_t>(part.size()) == size / replicas);
        drop.insert(drop.end(), part.begin(), part.end());
      }
      CHECK(std::set<int64_t>(drop.begin(), drop.end()).size() == drop.size());
      for (const Rows& part : parts(size, replicas, DistributedMode::pad, true)) {
        CHECK(static_cast<int64_t>(part.size()) == (size + replicas - 1) / replicas);
        pad.insert(part.begin(), part.end());
      }
      CHECK(static_cast<int64_t>(pad.size()) == size);
    }
  }
}

TEST_CASE("sampler: replicas share the order of one process") {
  const Rows whole = RandomSampler(12, 9).order(2);
  for (int64_t rank = 0; rank < 3; ++rank) {
    const Rows part = DistributedSampler(12, {.num_replicas = 3, .rank = rank, .seed = 9}).order(2);
    for (std::size_t i = 0; i < part.size(); ++i) CHECK(part[i] == whole[3 * i + static_cast<std::size_t>(rank)]);
  }
}

TEST_CASE("sampler: wrong settings are errors") {
  CHECK_ERROR(SequentialSampler(-1), "[SequentialSampler] size -1 is negative");
  CHECK_ERROR(RandomSampler(-2), "[RandomSampler] size -2 is negative");
  CHECK_ERROR(DistributedSampler(-3), "[DistributedSampler] size -3 is negative");
  CHECK_ERROR(DistributedSampler(4, {.num_replicas = 0}), "num_replicas is 0; give 1 or more");
  CHECK_ERROR(DistributedSampler(4, {.num_replicas = 2, .rank = 2}), "rank 2 is out of range", "give 0 to 1");
  CHECK_ERROR(DistributedSampler(4, {.num_replicas = 2, .rank = -1}), "rank -1 is out of range");
}

// pytorch#73141 and #31771: the distributed random sampler gave the same order in every epoch.
TEST_CASE("report: distributed random orders differ between epochs and stay disjoint") {
  std::vector<Rows> epochs[2];
  for (int64_t rank = 0; rank < 2; ++rank) {
    DistributedSampler sampler(100, {.num_replicas = 2, .rank = rank, .shuffle = true, .seed = 5});
    DistributedSampler again(100, {.num_replicas = 2, .rank = rank, .shuffle = true, .seed = 5});
    for (int64_t epoch = 0; epoch < 2; ++epoch) {
      sampler.set_epoch(epoch);
      epochs[epoch].push_back(sampler.rows());
      again.set_epoch(1 - epoch);  // in another order of calls
      again.set_epoch(epoch);
      CHECK(again.rows() == epochs[epoch].back());
    }
  }
  for (const auto& ranks : epochs) {
    Rows all = ranks[0];
    all.insert(all.end(), ranks[1].begin(), ranks[1].end());
    CHECK(sorted(all) == count_to(100));
  }
  CHECK(epochs[0][0] != epochs[1][0]);
  CHECK(epochs[0][1] != epochs[1][1]);
}

}  // namespace
}  // namespace tandem
