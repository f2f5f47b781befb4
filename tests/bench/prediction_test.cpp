// The arithmetic of the advice, on made-up numbers.
#include <tandem/bench/prediction.h>
#include <tandem/bench/timing.h>
#include <tandem/tests/support/test.h>

using namespace bench;

namespace {

Pieces pieces_of_two() {
  return {.devices = 2,
          .compute = {{32, 400}, {64, 700}},
          .update = 80,
          .dp_slowdown = 1.1,
          .ddp_slowdown = 1.2,
          .dp_wrapper = 20,
          .dp_sum = 50,
          .ddp_wrapper = 30,
          .all_reduce = {{4000, 10}, {1'004'000, 110}, {2'004'000, 310}},
          .hidden_share = 0.5};
}

constexpr Candidate kOne = {};

}  // namespace

TEST_CASE("a curve is a line between what was measured") {
  const Curve curve{{10, 100}, {20, 140}, {40, 160}};
  CHECK(at(curve, 10) == 100);
  CHECK(at(curve, 15) == doctest::Approx(120));
  CHECK(at(curve, 20) == 140);
  CHECK(at(curve, 30) == doctest::Approx(150));
  CHECK(at(curve, 40) == 160);
  CHECK(at(curve, 0) == doctest::Approx(60));
  CHECK(at(curve, 80) == doctest::Approx(200));
  CHECK(at({{5, 7}}, 100) == 7);
}

TEST_CASE("one device computes and updates") {
  const Prediction p = predict(pieces_of_two(), kOne, 64);
  CHECK(p.compute == 700);
  CHECK(p.update == 80);
  CHECK(p.step() == 780);
}

TEST_CASE("DataParallel divides rows and the update") {
  const Prediction p = predict(pieces_of_two(), {.mode = Mode::dp, .devices = 2}, 64);
  CHECK(p.compute == 400);
  CHECK(p.update == 40);
  CHECK(p.waiting == doctest::Approx(44));
  CHECK(p.exchange == 50);
  CHECK(p.wrapper == 20);
  CHECK(p.step() == doctest::Approx(554));
  // The larger part counts.
  CHECK(predict(pieces_of_two(), {.mode = Mode::dp, .devices = 2}, 65).compute == doctest::Approx(400 + 300.0 / 32));
}

TEST_CASE("DistributedDataParallel updates all weights and hides early buckets") {
  Candidate c{.mode = Mode::ddp, .devices = 2, .bucket_mb = 1, .bucket_bytes = {1'004'000, 2'004'000, 4000}};
  Prediction p = predict(pieces_of_two(), c, 64);
  CHECK(p.update == 80);
  CHECK(p.waiting == doctest::Approx(96));
  CHECK(p.exchange == doctest::Approx((110 + 310) * 0.5 + 10));
  CHECK(p.wrapper == 30);
  CHECK(p.step() == doctest::Approx(400 + 80 + 96 + 220 + 30));
  c.bucket_bytes = {2'004'000};  // one bucket has nothing to hide behind
  CHECK(predict(pieces_of_two(), c, 64).exchange == 310);
  Pieces slow = pieces_of_two();  // no more is hidden than there is computing
  slow.all_reduce = {{0, 0}, {1000, 1000}};
  slow.hidden_share = 1;
  c.bucket_bytes = {1000, 100};
  CHECK(predict(slow, c, 64).exchange == doctest::Approx(1100 - 400));
}

TEST_CASE("only groups with a thread of their own hide an exchange behind computing") {
  CHECK_FALSE(works_beside("shm"));
  CHECK_FALSE(works_beside("thread"));
  CHECK(works_beside("gloo"));
  CHECK(works_beside("mpi"));
}

TEST_CASE("rounds are summed up by the mean of their middle") {
  CHECK(mean_of_middle({10, 1, 9, 2, 8, 3, 7, 4, 6, 500}) == doctest::Approx(49.0 / 8));  // without 1 and 500
  CHECK(mean_of_middle({1, 2, 6}) == doctest::Approx(3));
}

TEST_CASE("what limits is the largest loss") {
  const Prediction one = predict(pieces_of_two(), kOne, 64);
  auto limit = [&](const Pieces& pieces, Mode mode) {
    return what_limits(predict(pieces, {.mode = mode, .devices = 2, .bucket_mb = 1, .bucket_bytes = {4000}}, 64), one);
  };
  CHECK(what_limits(one, one) == "the base of the comparison");
  Pieces pieces = pieces_of_two();
  CHECK(limit(pieces, Mode::dp).find("small parts") == 0);
  pieces.dp_sum = 60;
  CHECK(limit(pieces, Mode::dp) == "the sum of the gradients (60 us)");
  pieces.dp_wrapper = 70;
  CHECK(limit(pieces, Mode::dp) == "fixed costs of the wrapper (70 us)");
  pieces.dp_slowdown = 1.5;
  CHECK(limit(pieces, Mode::dp) == "waiting for the slowest, and memory that the cores share (220 us)");
  pieces.ddp_slowdown = 1;
  pieces.update = 200;
  const Prediction slow_update = predict(pieces, {.mode = Mode::ddp, .devices = 2, .bucket_mb = 1}, 64);
  CHECK(what_limits(slow_update, predict(pieces, kOne, 64)) == "every rank updates all weights (100 us)");
  pieces.update = 80;
  pieces.all_reduce = {{4000, 500}};
  CHECK(limit(pieces, Mode::ddp) == "the all-reduce (500 us)");
  pieces = {.devices = 2, .compute = {{32, 350}, {64, 700}}, .update = 10};
  CHECK(what_limits(predict(pieces, {.mode = Mode::dp, .devices = 2}, 64), predict(pieces, kOne, 64)) ==
        "hardly anything");
}

TEST_CASE("the fastest is chosen, and of nearly equal ones the first") {
  auto takes = [](double microseconds) {
    Prediction p;
    p.compute = microseconds;
    return p;
  };
  CHECK(best_of({takes(100), takes(90), takes(60), takes(61)}) == 2);
  CHECK(best_of({takes(100), takes(61), takes(60.5), takes(70)}) == 1);
  CHECK(best_of({takes(100), takes(99), takes(120)}) == 0);
  CHECK(best_of({takes(100), takes(99)}, 0) == 1);
}

TEST_CASE("a candidate in words") {
  CHECK(describe(kOne) == "one device");
  CHECK(describe({.mode = Mode::dp, .devices = 4}) == "DataParallel on 4 devices");
  CHECK(describe({.mode = Mode::ddp, .devices = 2, .bucket_mb = 0.25}) ==
        "DistributedDataParallel on 2 ranks, buckets of 0.25 MiB");
}
