// The loader: which batches it gives, that workers change nothing, and what happens on the way out.
#include <tandem/data/loader.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <latch>
#include <thread>

#include <tandem/tensor/random.h>
#include <tandem/tensor/threads.h>
#include <tandem/tests/data/files.h>

namespace tandem {
namespace {

using namespace test;
using data::DataLoader;
using data::DataLoaderOptions;
using data::TensorDataset;
using Rows = std::vector<int64_t>;

TensorDataset<1> numbers(int64_t n) { return TensorDataset(arange(n)); }

// The rows of each batch of one epoch.
std::vector<Rows> batches(DataLoader<1>& loader) {
  std::vector<Rows> all;
  for (auto [x] : loader) all.push_back(x.to_vector<int64_t>());
  return all;
}
std::vector<Rows> batches(int64_t n, DataLoaderOptions options) {
  DataLoader loader(numbers(n), std::move(options));
  std::vector<Rows> all = batches(loader);
  CHECK(static_cast<int64_t>(all.size()) == loader.size());
  return all;
}
Rows joined(const std::vector<Rows>& parts) {
  Rows all;
  for (const Rows& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

// Throws at one row, in any thread.
struct Thrower : data::Dataset<1> {
  explicit Thrower(int64_t bad) : bad_row(bad) {}
  int64_t size() const override { return 20; }
  std::array<Tensor, 1> get(int64_t i) const override {
    if (i == bad_row) throw std::out_of_range("image " + std::to_string(i) + " is torn");
    return {tensor(i)};
  }
  int64_t bad_row;
};

// Draws random numbers for each example.
struct Noisy : data::Dataset<1> {
  int64_t size() const override { return 30; }
  std::array<Tensor, 1> get(int64_t) const override { return {randn({3})}; }
};

// Draws random numbers a batch at a time.
struct NoisyBatches : Noisy {
  std::array<Tensor, 1> get_batch(std::span<const int64_t> rows) const override {
    return {rand({static_cast<int64_t>(rows.size()), 2})};
  }
};

TEST_CASE("loader: batches in order, with an uneven last one") {
  for (const int workers : {0, 1, 3}) {
    CHECK(batches(7, {.batch_size = 3, .num_workers = workers}) == std::vector<Rows>{{0, 1, 2}, {3, 4, 5}, {6}});
    CHECK(batches(7, {.batch_size = 3, .num_workers = workers, .drop_last = true}) ==
          std::vector<Rows>{{0, 1, 2}, {3, 4, 5}});
    CHECK(batches(6, {.batch_size = 3, .num_workers = workers}) == std::vector<Rows>{{0, 1, 2}, {3, 4, 5}});
    CHECK(batches(2, {.num_workers = workers}) == std::vector<Rows>{{0}, {1}});
  }
}

TEST_CASE("loader: no rows, and batches larger than the data") {
  for (const int workers : {0, 2}) {
    CHECK(batches(0, {.batch_size = 4, .num_workers = workers}).empty());
    CHECK(batches(0, {.batch_size = 4, .shuffle = true, .num_workers = workers}).empty());
    CHECK(batches(3, {.batch_size = 100, .num_workers = workers}) == std::vector<Rows>{{0, 1, 2}});
    CHECK(batches(3, {.batch_size = 100, .num_workers = workers, .drop_last = true}).empty());
    CHECK(batches(3, {.batch_size = INT64_MAX, .num_workers = workers}).size() == 1);
  }
}

TEST_CASE("loader: sizes") {
  const DataLoader loader(numbers(10), {.batch_size = 4});
  CHECK(loader.size() == 3);
  CHECK(loader.batch_size() == 4);
  CHECK(DataLoader(numbers(10), {.batch_size = 4, .drop_last = true}).size() == 2);
  CHECK(DataLoader(numbers(10)).size() == 10);
}

TEST_CASE("loader: wrong options are errors") {
  CHECK_ERROR(DataLoader(numbers(3), {.batch_size = 0}), "[DataLoader] batch_size is 0; give 1 or more");
  CHECK_ERROR(DataLoader(numbers(3), {.batch_size = -1}), "batch_size is -1");
  CHECK_ERROR(DataLoader(numbers(3), {.num_workers = -1}), "num_workers is -1; give 0 to 256");
  CHECK_ERROR(DataLoader(numbers(3), {.num_workers = 257}), "num_workers is 257");
  CHECK_ERROR(DataLoader(numbers(3), {.shuffle = true, .sampler = std::make_shared<data::SequentialSampler>(3)}),
              "shuffle and a sampler were both given; leave shuffle out");
  CHECK_ERROR(DataLoader(std::shared_ptr<TensorDataset<1>>()), "has no dataset");
}

TEST_CASE("loader: a dataset may be given by value or by shared_ptr") {
  DataLoader a(Thrower(-1), {.batch_size = 20}), b(std::make_shared<Thrower>(-1), {.batch_size = 20});
  DataLoader c(std::make_shared<const Thrower>(-1), {.batch_size = 20});
  CHECK(batches(a) == batches(b));
  CHECK(batches(a) == batches(c));
}

TEST_CASE("loader: several tensors an example, in every form of the loop") {
  const TensorDataset set(arange(6), arange(6) * 2, ones({6, 2}));
  DataLoader loader(set, {.batch_size = 4});
  int64_t rows = 0;
  for (int64_t batch = 0; auto [a, b, c] : loader) {
    CHECK(a.to_vector<int64_t>()[0] == 4 * batch);
    CHECK(b.to_vector<int64_t>()[0] == 8 * batch);
    CHECK(c.shape() == Shape{a.size(0), 2});
    rows += a.size(0);
    ++batch;
  }
  for (auto& [a, b, c] : loader) rows += b.size(0);
  for (const auto& [a, b, c] : loader) rows += b.size(0);
  for (auto&& batch : DataLoader(set, {.batch_size = 4})) rows += batch[2].size(0);
  CHECK(rows == 24);
}

TEST_CASE("loader: a batch kept beyond the loop keeps its values") {
  std::vector<Tensor> kept;
  for (auto [x] : DataLoader(numbers(100), {.batch_size = 10, .num_workers = 2})) kept.push_back(x);
  for (std::size_t i = 0; i < kept.size(); ++i) CHECK(kept[i].to_vector<int64_t>()[3] == int64_t(10 * i + 3));
}

TEST_CASE("loader: shuffled orders depend on seed and epoch, not on workers or manual_seed") {
  DataLoader loader(numbers(50), {.batch_size = 8, .shuffle = true, .seed = 4});
  const std::vector<Rows> first = batches(loader), second = batches(loader);
  Rows all = joined(first);
  CHECK(all == data::RandomSampler(50, 4).order(0));
  CHECK(joined(second) == data::RandomSampler(50, 4).order(1));
  CHECK(first != second);
  std::sort(all.begin(), all.end());
  CHECK(all == data::SequentialSampler(50).rows());

  manual_seed(99);
  DataLoader same(numbers(50), {.batch_size = 8, .shuffle = true, .num_workers = 3, .seed = 4});
  CHECK(batches(same) == first);
  CHECK(batches(same) == second);
  CHECK(same.epoch() == 2);
  same.set_epoch(0);
  CHECK(batches(same) == first);
  DataLoader other(numbers(50), {.batch_size = 8, .shuffle = true, .seed = 5});
  CHECK(batches(other) != first);
}

TEST_CASE("loader: training resumes in the middle of an epoch") {
  for (const int workers : {0, 2}) {
    const DataLoaderOptions options{.batch_size = 8, .shuffle = true, .num_workers = workers, .seed = 4};
    DataLoader straight(numbers(50), options);
    (void)batches(straight);
    std::vector<Rows> rest = batches(straight);
    rest.erase(rest.begin(), rest.begin() + 3);

    DataLoader resumed(numbers(50), options);
    resumed.set_epoch(1);
    resumed.skip_batches(3);
    CHECK(batches(resumed) == rest);
    CHECK(batches(resumed) == batches(straight));  // the next epoch is whole
    resumed.skip_batches(resumed.size());
    CHECK(batches(resumed).empty());
  }
  DataLoader loader(numbers(50), {.batch_size = 8});
  CHECK_ERROR(loader.skip_batches(8), "[skip_batches] 8 batches cannot be left out; an epoch has 7");
  CHECK_ERROR(loader.skip_batches(-1), "-1 batches cannot be left out");
  CHECK_ERROR(loader.set_epoch(-1), "[set_epoch] epoch -1 is negative");
}

TEST_CASE("loader: skipped batches are not read") {
  DataLoader loader(Thrower(3), {.batch_size = 4});
  loader.skip_batches(1);
  CHECK(batches(loader).size() == 4);
}

TEST_CASE("loader: a sampler gives the rows and keeps the epoch") {
  const auto sampler = std::make_shared<data::DistributedSampler>(
      21, data::DistributedSamplerOptions{.num_replicas = 2, .rank = 1, .mode = data::DistributedMode::exact});
  DataLoader loader(numbers(21), {.batch_size = 4, .sampler = sampler, .num_workers = 2});
  CHECK(loader.size() == 3);
  CHECK(joined(batches(loader)) == sampler->order(0));
  CHECK(sampler->epoch() == 1);
  sampler->set_epoch(6);
  CHECK(joined(batches(loader)) == sampler->order(6));
  CHECK(loader.epoch() == 7);

  DataLoader beyond(numbers(3), {.sampler = std::make_shared<data::SequentialSampler>(5)});
  CHECK_ERROR(beyond.begin(), "[DataLoader] the sampler gave row 3; the dataset has 3 rows");
}

TEST_CASE("loader: replicas' batches are parts of one process's batch") {
  DataLoader whole(numbers(30), {.batch_size = 8, .shuffle = true, .seed = 3});
  std::vector<std::vector<Rows>> parts;
  for (int64_t rank = 0; rank < 2; ++rank) {
    const auto sampler = std::make_shared<data::DistributedSampler>(
        30, data::DistributedSamplerOptions{.num_replicas = 2, .rank = rank, .seed = 3});
    DataLoader part(numbers(30), {.batch_size = 4, .sampler = sampler});
    parts.push_back(batches(part));
  }
  const std::vector<Rows> all = batches(whole);
  for (std::size_t b = 0; b < all.size(); ++b) {
    Rows both = joined({parts[0][b], parts[1][b]}), expected = all[b];
    std::sort(both.begin(), both.end());
    std::sort(expected.begin(), expected.end());
    CHECK(both == expected);
  }
}

TEST_CASE("loader: two loops over one loader are two epochs") {
  DataLoader loader(numbers(5), {.batch_size = 2, .num_workers = 2});
  int inner = 0;
  for (auto [a] : loader)
    for (auto [b] : loader) inner += static_cast<int>(b.size(0));
  CHECK(inner == 15);
  CHECK(loader.epoch() == 4);
}

TEST_CASE("loader: the epoch outlives the loader") {
  auto loader = std::make_unique<DataLoader<1>>(numbers(6), DataLoaderOptions{.batch_size = 2, .num_workers = 2});
  auto it = loader->begin();
  const auto end = loader->end();
  loader.reset();
  int rows = 0;
  for (; it != end; ++it) rows += static_cast<int>((*it)[0].size(0));
  CHECK(rows == 6);
}

TEST_CASE("loader: random numbers of examples do not depend on threads, batches or the global seed") {
  const auto draw_all = [](int workers, int64_t batch_size, bool shuffle) {
    DataLoader loader(Noisy(), {.batch_size = batch_size, .shuffle = shuffle, .num_workers = workers, .seed = 6});
    std::vector<std::vector<float>> by_row(30);
    const Rows order = shuffle ? data::RandomSampler(30, 6).order(0) : data::SequentialSampler(30).rows();
    std::size_t at = 0;
    for (auto [x] : loader)
      for (int64_t i = 0; i < x.size(0); ++i) by_row[static_cast<std::size_t>(order[at++])] = x[i].to_vector<float>();
    return by_row;
  };
  manual_seed(1);
  const auto reference = draw_all(0, 7, false);
  const Tensor next = rand({3});
  for (std::size_t i = 1; i < 30; ++i) CHECK(reference[i] != reference[0]);
  CHECK(draw_all(0, 7, false) == reference);
  CHECK(draw_all(3, 4, false) == reference);
  CHECK(draw_all(2, 30, true) == reference);
  manual_seed(1);  // the loader took nothing from the global numbers
  CHECK(rand({3}).to_vector<float>() == next.to_vector<float>());

  DataLoader epochs(Noisy(), {.batch_size = 30, .seed = 6});
  const auto once = (*epochs.begin())[0].to_vector<float>(), twice = (*epochs.begin())[0].to_vector<float>();
  CHECK(once != twice);

  std::vector<std::vector<float>> whole[2];
  for (const int workers : {0, 2})
    for (auto [x] : DataLoader(NoisyBatches(), {.batch_size = 4, .num_workers = workers}))
      whole[workers / 2].push_back(x.to_vector<float>());
  CHECK(whole[0] == whole[1]);
  CHECK(whole[0][0] != whole[0][1]);
}

TEST_CASE("loader: worker threads compute alone") {
  struct Probe : data::Dataset<2> {
    int64_t size() const override { return 4; }
    std::array<Tensor, 2> get(int64_t) const override {
      return {tensor(threads_per_device()), tensor(std::this_thread::get_id() == caller)};
    }
    std::thread::id caller = std::this_thread::get_id();
  };
  const int before = num_threads();
  set_num_threads(4);
  for (auto [threads, here] : DataLoader(Probe(), {.num_workers = 1})) {
    CHECK(threads.item<int>() == 1);
    CHECK_FALSE(here.item<bool>());
  }
  for (auto [threads, here] : DataLoader(Probe())) {
    CHECK(threads.item<int>() == threads_per_device());
    CHECK(here.item<bool>());
  }
  set_num_threads(before);
}

TEST_CASE("loader: workers run at the same time and stay within two batches each") {
  struct Meeting : data::Dataset<1> {
    int64_t size() const override { return 40; }
    std::array<Tensor, 1> get(int64_t i) const override {
      if (i < 3) met->arrive_and_wait();  // only three threads at once get past
      ++*made;
      return {tensor(i)};
    }
    std::shared_ptr<std::latch> met = std::make_shared<std::latch>(3);
    std::shared_ptr<std::atomic<int>> made = std::make_shared<std::atomic<int>>(0);
  };
  const Meeting set;
  int taken = 0;
  for (auto [x] : DataLoader(set, {.num_workers = 3})) {
    CHECK(x.to_vector<int64_t>()[0] == taken);
    ++taken;
    CHECK(*set.made <= taken + 6);
  }
  CHECK(taken == 40);
  CHECK(*set.made == 40);
}

TEST_CASE("loader: an exception of the dataset comes at its batch, as it is, and once") {
  for (const int workers : {0, 1, 3}) {
    DataLoader loader(Thrower(7), {.batch_size = 2, .num_workers = workers});
    for (int time = 0; time < 2; ++time) {  // the loader can be used again
      std::vector<Rows> seen;
      std::string text;
      try {
        for (auto [x] : loader) seen.push_back(x.to_vector<int64_t>());
      } catch (const std::out_of_range& e) {
        text = e.what();
      }
      CHECK(text == "image 7 is torn");
      CHECK(seen == std::vector<Rows>{{0, 1}, {2, 3}, {4, 5}});
    }
    CHECK(loader.epoch() == 2);
    loader.skip_batches(4);
    CHECK(batches(loader).size() == 6);

    auto it = loader.begin();
    for (int i = 0; i < 2; ++i) ++it;
    CHECK_THROWS_AS(++it, std::out_of_range);
    ++it;  // the epoch has ended
    CHECK(it == loader.end());
  }
}

TEST_CASE("loader: errors of stacking name the row") {
  struct Ragged : data::Dataset<1> {
    int64_t size() const override { return 4; }
    std::array<Tensor, 1> get(int64_t i) const override { return {ones({i < 3 ? 2 : 5})}; }
  };
  DataLoader loader(Ragged(), {.batch_size = 4, .num_workers = 1});
  CHECK_ERROR(loader.begin(), "tensor 0 of row 0 is float32 {2}", "of row 3 float32 {5}");
}

// pytorch#48666 and #9985: leaving the loop early, or an exception in a worker, hung when the loader was destroyed.
constexpr const char* kLeaveEarly = "report: leaving the loop early joins the workers even in the middle of a batch";
TEST_CASE(kLeaveEarly* doctest::skip()) {
  struct Slow : data::Dataset<1> {  // a batch beyond the first takes 20 s
    int64_t size() const override { return 100000; }
    std::array<Tensor, 1> get(int64_t i) const override {
      if (i >= 1000) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      return {tensor(i)};
    }
  };
  DataLoader loader(Slow(), {.batch_size = 1000, .num_workers = 2});
  for (int time = 0; time < 3; ++time) {
    for (auto [x] : loader) {
      CHECK(x.size(0) == 1000);
      break;
    }
  }
  for (int time = 0; time < 10; ++time) {  // also at once, and by an exception of the user's own
    (void)loader.begin();
    CHECK_THROWS_AS(
        [&] {
          for (auto [x] : loader) throw x.size(0);
        }(),
        int64_t);
  }
}
constexpr const char* kWorkerThrows = "report: an exception in one of two workers ends the epoch and not the program";
TEST_CASE(kWorkerThrows* doctest::skip()) {
  for (int time = 0; time < 100; ++time) {
    DataLoader loader(Thrower(7), {.num_workers = 2});
    int rows = 0;
    std::string text;
    try {
      for (auto [x] : loader) ++rows;
    } catch (const std::exception& e) {
      text = e.what();
    }
    CHECK(rows == 7);
    CHECK(text == "image 7 is torn");
  }
}
TEST_CASE("loader: the ways out do not hang") {
  CHECK(run_alone(kLeaveEarly, 20) == 0);
  CHECK(run_alone(kWorkerThrows, 20) == 0);
}

}  // namespace
}  // namespace tandem
