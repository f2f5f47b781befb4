// Random numbers: known answers, streams, distributions, independence of threads.
#include <tandem/tests/support/test.h>

#include <algorithm>
#include <array>
#include <cmath>

#include <tandem/tensor/random.h>
#include <tandem/tensor/threads.h>

namespace tandem::test {
namespace {

using Words = std::array<std::uint32_t, 4>;

Words philox_words(std::uint64_t seed, std::uint64_t stream, std::uint64_t block) {
  const Philox4 p = philox({.seed = seed, .stream = stream, .block = block}, 0);
  return {p.x[0], p.x[1], p.x[2], p.x[3]};
}

}  // namespace

// The kat_vectors of Random123, philox4x32 with 10 rounds: counter words 0, 1 are our block, 2, 3 our stream.
TEST_CASE("philox: known answers") {
  CHECK(philox_words(0, 0, 0) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox_words(~0ULL, ~0ULL, ~0ULL) == Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox_words(0x299f31d0a4093822ULL, 0x0370734413198a2eULL, 0x85a308d3243f6a88ULL) ==
        Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
  const Philox4 moved = philox({.seed = 1, .stream = 2, .block = 3}, 4);
  CHECK(Words{moved.x[0], moved.x[1], moved.x[2], moved.x[3]} == philox_words(1, 2, 7));
}

TEST_CASE("random: a seed repeats everything, another seed nothing") {
  auto draw_all = [](std::uint64_t seed) {
    manual_seed(seed);
    return cat({rand({10}), randn({10}), randint(0, 1000, {10}).to(float32), randperm(10).to(float32),
                dropout(ones({10}), 0.5, true), rand({3}, {.dtype = float64}).to(float32)});
  };
  CHECK(equal(draw_all(5), draw_all(5)));
  CHECK_FALSE(equal(draw_all(5), draw_all(6)));
  manual_seed(1);
  CHECK_FALSE(equal(rand({10}), rand({10})));
}

TEST_CASE("random: element i depends on the position only") {
  manual_seed(4);
  const Tensor longer = rand({1003});
  manual_seed(4);
  CHECK(equal(rand({17, 59}).flatten(), longer));
  manual_seed(4);
  CHECK(equal(rand({10}), longer.narrow(0, 0, 10)));
}

TEST_CASE("random: streams differ, end with their scope, and are saved") {
  manual_seed(9);
  const Tensor main = rand({8});
  Tensor other;
  {
    const RandomStream stream(3);
    CHECK(RandomStream::current() == 3);
    other = rand({8});
  }
  CHECK(RandomStream::current() == 0);
  CHECK_FALSE(equal(main, other));
  const RandomState state = random_state();
  CHECK(state.seed == 9);
  CHECK(state.positions == std::vector<std::uint64_t>{2, 0, 0, 2});
  const Tensor next = rand({8});
  set_random_state(state);
  CHECK(equal(rand({8}), next));
  manual_seed(9);
  const RandomStream stream(3);
  CHECK(equal(rand({8}), other));
  CHECK_ERROR(RandomStream(-1), "[RandomStream]", "-1", "0 to 4095");
  CHECK_ERROR(RandomStream(4096), "[RandomStream]");
  CHECK_ERROR(set_random_state({0, std::vector<std::uint64_t>(5000)}), "[set_random_state]", "5000 streams");
  CHECK(RandomStream::current() == 3);
}

TEST_CASE("random: a captured draw takes nothing until it is replayed") {
  manual_seed(9);
  (void)draw(5);
  UniqueFunction<PhiloxKey()> again;
  {
    const RandomStream stream(2);
    again = repeat_draw(draw(3), 3);
  }
  CHECK(random_state().positions == std::vector<std::uint64_t>{5});
  const PhiloxKey first = again(), second = again();
  CHECK(first.seed == 9);
  CHECK(first.stream == 2);
  CHECK(first.block == 0);
  CHECK(second.block == 3);
  CHECK(random_state().positions == std::vector<std::uint64_t>{5, 0, 6});
  const RandomScope scope({.seed = 1, .stream = kMaxStreams, .block = 0});
  CHECK_ERROR(repeat_draw(draw(3), 3).operator bool(), "RandomScope", "without a graph");
}

TEST_CASE("random: the number of threads changes nothing") {
  const int before = num_threads();
  Tensor first;
  for (const int threads : {1, 2, 3}) {
    set_num_threads(threads);
    manual_seed(2);
    const Tensor all = cat({rand({200'001}), randn({200'001}), randint(0, 7, {200'001}, {.dtype = float32}),
                            dropout(ones({200'001}), 0.3, true), randn({100'001}, {.dtype = float64}).to(float32)});
    if (!first.defined()) first = all;
    CHECK(equal(all, first));
  }
  set_num_threads(before);
}

TEST_CASE("random: distributions") {
  manual_seed(7);
  constexpr int64_t n = 400'000;
  for (const DType dtype : {float32, float64}) {
    const Tensor u = rand({n}, {.dtype = dtype}), z = randn({n}, {.dtype = dtype});
    CHECK(min(u).item<double>() >= 0);
    CHECK(max(u).item<double>() < 1);
    CHECK(mean(u).item<double>() == doctest::Approx(0.5).epsilon(0.005));
    CHECK(var(u).item<double>() == doctest::Approx(1.0 / 12).epsilon(0.01));
    CHECK(std::abs(mean(z).item<double>()) < 0.01);
    CHECK(var(z).item<double>() == doctest::Approx(1).epsilon(0.01));
    CHECK(mean(z * z * z * z).item<double>() == doctest::Approx(3).epsilon(0.03));
    CHECK(mean((z > 1.0).to(float32)).item<double>() == doctest::Approx(0.158655).epsilon(0.02));
    const Tensor neighbours = z.narrow(0, 0, n - 1) * z.narrow(0, 1, n - 1);
    CHECK(std::abs(mean(neighbours).item<double>()) < 0.01);
  }
  const Tensor k = randint(-3, 4, {n});
  CHECK(k.dtype() == int64);
  for (int64_t v = -3; v < 4; ++v) CHECK(sum(k == v).item<double>() == doctest::Approx(n / 7.0).epsilon(0.02));
  CHECK(min(k).item<int>() == -3);
  CHECK(max(k).item<int>() == 3);
  const Tensor kept = dropout(ones({n}), 0.25, true);
  CHECK(sum(kept == 0).item<double>() == doctest::Approx(n * 0.25).epsilon(0.02));
  CHECK(sum(kept == static_cast<double>(1 / 0.75F)).item<double>() == doctest::Approx(n * 0.75).epsilon(0.02));
}

TEST_CASE("random: permutations") {
  manual_seed(1);
  std::vector<int> first(5, 0);
  for (int i = 0; i < 1000; ++i) {
    auto p = randperm(5).to_vector<int64_t>();
    ++first[static_cast<std::size_t>(p[0])];
    std::sort(p.begin(), p.end());
    REQUIRE(p == std::vector<int64_t>{0, 1, 2, 3, 4});
  }
  for (const int count : first) CHECK(count > 140);
  CHECK(randperm(0).shape() == Shape{0});
  CHECK(randperm(1).item<int>() == 0);
  CHECK_ERROR(randperm(-1), "[randperm]", "-1");
}

TEST_CASE("random: errors, and dropout's edges") {
  CHECK_ERROR(rand({2}, {.dtype = int64}), "[rand]", "int64", "float32");
  CHECK_ERROR(randn({2}, {.dtype = bfloat16}), "[randn]", "bfloat16", ".to()");
  CHECK_ERROR(randint(3, 3, {2}), "[randint]", "from 3", "low < high");
  CHECK_ERROR(randint(0, 257, {2}, {.dtype = uint8}), "[randint]", "uint8", "256");
  CHECK_ERROR(randint(-1, 5, {2}, {.dtype = uint8}), "[randint]", "uint8");
  CHECK_ERROR(randint(0, int64_t{1} << 40, {2}, {.dtype = int32}), "[randint]", "int32");
  CHECK_ERROR(randint(0, int64_t{1} << 60, {2}), "[randint]", "2^53");
  CHECK(max(randint(0, 256, {5000}, {.dtype = uint8})).item<int>() == 255);
  CHECK(rand({0, 3}).shape() == Shape{0, 3});
  const Tensor x = ones({4});
  CHECK(dropout(x, 0.5, false).identity() == x.identity());
  CHECK(dropout(x, 0, true).identity() == x.identity());
  CHECK(equal(dropout(x, 1, true), zeros({4})));
  CHECK_ERROR(dropout(x, 1.5, true), "[dropout]", "1.5", "0..1");
  CHECK_ERROR(dropout(x, -0.1, true), "[dropout]");
  CHECK_ERROR(dropout(tensor({1, 2}), 0.5, true), "[dropout]", "int64");
}

}  // namespace tandem::test
