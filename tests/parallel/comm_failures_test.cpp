// Process groups of threads: ranks that end, throw, leave, or are silent.
#include <atomic>
#include <chrono>
#include <thread>

#include <tandem/tandem.h>
#include <tandem/tests/parallel/collective_cases.h>
#include <tandem/tests/parallel/thread_ranks.h>
#include <tandem/tests/support/test.h>

using namespace tandem;
using parallel::CommError;
using test::impatient_group;
using test::kImpatientSeconds;
using test::on_ranks;
using test::require;
using test::require_error;
using test::same_bits;

namespace {

std::string waited(std::string_view what) { return fmt::format("waited {} s in {}", kImpatientSeconds, what); }

}  // namespace

TEST_CASE("a rank that leaves early, having done its share, is no error; one that is missing is") {
  parallel::spawn_threads(
      [](int rank, int) {
        parallel::init_process_group();
        const auto group = parallel::default_group();
        Tensor t = full({4}, 1.0 * rank);
        group->all_reduce(t).wait();
        require(same_bits(t, full({4}, 3.0)), "sum");
        if (rank == 2) return;
        const auto start = std::chrono::steady_clock::now();
        require_error(
            fmt::format("rank {} of 3: rank 2 has left the group while this rank waited in barrier (call 2)", rank),
            [&] { group->barrier().wait(); });
        require_error("rank 2 has left", [&] { group->all_reduce(t).wait(); });  // later calls end at once
        require(std::chrono::steady_clock::now() - start < std::chrono::seconds(5), "in time");
      },
      {.nthreads = 3});
}

TEST_CASE("the first failure of a rank is what spawn_threads throws; the others learn of it") {
  std::atomic<int> told = 0;
  CHECK_ERROR(parallel::spawn_threads(
                  [&](int rank, int) {
                    parallel::init_process_group();
                    if (rank == 1) fail("mine", "something is wrong");
                    try {
                      parallel::barrier();
                    } catch (const CommError& e) {
                      if (e.rank() == 1 && test::contains(e.what(), "rank 1 has failed ([mine] something")) ++told;
                      throw;
                    }
                  },
                  {.nthreads = 3}),
              "rank 1: [mine] something is wrong");
  CHECK(told == 2);
  CHECK_ERROR(parallel::spawn_threads([](int, int) {}, {.nthreads = 0}), "0 threads were asked for");
  CHECK_THROWS_AS(parallel::spawn_threads([](int, int) { throw 3; }, {.nthreads = 2}), int);
}

TEST_CASE("once a call has thrown, nobody writes its tensor or reads it") {
  for (const bool processes : {false, true})
    for (const bool late : {false, true}) {
      CAPTURE(processes);
      CAPTURE(late);
      std::atomic<bool> thrown = false, over = false;
      auto wait_for = [](const std::atomic<bool>& flag) {
        for (int i = 0; !flag && i < 20'000; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        require(flag, "the other rank has come so far");
      };
      auto run = [&](int rank, int) {
        auto group = impatient_group(processes, "g", late ? kImpatientSeconds : 30);
        Tensor t = group->allocate({100'000}, float32), own;
        t.fill_(rank + 1.0);
        group->barrier().wait();
        if (rank == 0) {
          parallel::Work work = group->all_reduce(t);
          if (late) {  // gives up on a rank that does not come
            require_error(waited("all_reduce"), [&] { work.wait(); });
          } else {  // an exception leaves the function while the call is posted
            try {
              const auto leaves = std::move(group);
              fail("mine", "an error");
            } catch (const Error&) {
            }
            require_error("the group was destroyed", [&] { work.wait(); });
          }
          own = t.clone();
          if (!processes) t = Tensor();  // its memory is free for others
          const Tensor next = zeros({100'000});
          thrown = true;
          wait_for(over);
          require(same_bits(own, full({100'000}, 1.0)), "no data have moved");
          require(same_bits(next, zeros({100'000})), "a later tensor in the place of the other");
          require(!t.defined() || same_bits(t, own), "the tensor stays");
        } else {
          wait_for(thrown);
          require_error(late ? "rank 0 has given up on rank" : "rank 0 has left", [&] { group->all_reduce(t).wait(); });
          over = true;
        }
      };
      CHECK_NOTHROW(parallel::spawn_threads(run, {.nthreads = 2}));
    }
}

TEST_CASE("a rank throws in the middle of calls") {
  for (const bool processes : {false, true})
    for (int i = 0; i < 20; ++i) {
      auto run = [&](int rank, int) {
        const auto group = impatient_group(processes, "g", 30);
        std::vector<Tensor> tensors;
        for (int k = 0; k < 8; ++k) {
          tensors.push_back(group->allocate({k % 2 == 0 ? 30'000 : 100}, float32));
          tensors.back().fill_(1.0);
        }
        for (int k = 0;; ++k) {
          auto& t = tensors[static_cast<std::size_t>(k % 8)];
          const parallel::Work work = group->all_reduce(t, parallel::ReduceOp::max);
          if (rank == 1 && k == 20 + i) fail("mine", "an error");
          if (k % 3 == 0) work.wait();
        }
      };
      CHECK_ERROR(parallel::spawn_threads(run, {.nthreads = 3}), "rank 1: [mine] an error");
    }
}

TEST_CASE("a silent rank is named with what it was last seen in") {
  std::atomic<bool> over = false;
  on_ranks(3, [&](parallel::ProcessGroup& all) {
    const auto g = impatient_group(false);
    Tensor t = ones({7});
    g->all_reduce(t).wait();
    if (all.rank() == 2) {
      while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      require_error("given up on rank 2", [&] { g->barrier().wait(); });
      return;
    }
    require_error("rank 2", [&] {
      try {
        g->barrier().wait();
      } catch (const CommError& e) {
        require(e.rank() == 2, "rank of the error");
        require(std::string_view(e.what()).find("given up on rank 2") != std::string_view::npos ||
                    std::string_view(e.what()).find(
                        waited("barrier (call 2) for rank 2 (last seen in all_reduce (sum, call 1) of {7} float32)")) !=
                        std::string_view::npos,
                e.what());
        throw;
      }
    });
    over = true;
  });
}

TEST_CASE("a rank that has started a call and does not work for it is told apart from one that has not come") {
  std::atomic<bool> over = false;
  parallel::spawn_threads(
      [&](int rank, int) {
        const auto g = impatient_group(true);
        Tensor t = ones({1'000'000});
        const parallel::Work work = g->all_reduce(t);
        if (rank == 1) {
          for (int i = 0; !over && i < 6000; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          require_error("given up on rank 1", [&] { work.wait(); });
          return;
        }
        require_error(
            "rank 0 of 2: " +
                waited("all_reduce (sum, call 1) of {1000000} float32 for rank 1 (it has started all_reduce "
                       "(sum, call 1) of {1000000} float32, but has not waited for it or asked for it since)"),
            [&] { work.wait(); });
        over = true;
      },
      {.nthreads = 2});
}

TEST_CASE("a rank that leaves ends the messages with it, and all else in the group") {
  for (const bool sends : {false, true}) {
    CAPTURE(sends);
    auto run = [&](int rank, int) {
      parallel::init_process_group();
      const auto group = parallel::default_group();
      Tensor t = full({4}, rank + 1.0), large = ones({2'000'000}), sum = ones({2});
      if (rank == 0) {
        group->recv(t, 1).wait();  // rank 1 has done its share of it
        require(same_bits(t, full({4}, 2.0)), "a message of a rank that then leaves");
        const parallel::Work work = sends ? group->send(large, 1) : group->recv(large, 1);
        const parallel::Work other = group->recv(t, 2), reduced = group->all_reduce(sum);
        const auto start = std::chrono::steady_clock::now();
        const std::string what = fmt::format(
            "rank 0 of 3: rank 1 has left the group while this rank waited in {} 1, "
            "call {}) of {{2000000}} float32",
            sends ? "send (to" : "recv (from", sends ? 1 : 2);
        require_error(what, [&] { work.wait(); });
        require_error(what, [&] { work.wait(); });
        require_error("rank 1 has left the group while this rank waited in", [&] { other.wait(); });
        require_error("rank 1 has left the group while this rank waited in", [&] { reduced.wait(); });
        require_error("rank 1 has left the group", [&] { group->send(t, 2).wait(); });  // later calls end at once
        require(std::chrono::steady_clock::now() - start < std::chrono::seconds(5), "in time");
      } else if (rank == 1) {
        group->send(t, 0).wait();
      } else {
        require_error("rank 2 of 3: rank", [&] { group->recv(t, 0).wait(); });
      }
    };
    CHECK_NOTHROW(parallel::spawn_threads(run, {.nthreads = 3}));
  }
}

TEST_CASE("a silent peer of a message is named with what it was last seen in; nobody writes the tensor afterwards") {
  for (const bool processes : {false, true}) {
    CAPTURE(processes);
    std::atomic<int> stage = 0;
    const auto wait_for = [&](int n) {
      for (int i = 0; stage < n && i < 6000; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      require(stage >= n, "the other rank has come so far");
    };
    const auto on_two = [&](const auto& body) {
      stage = 0;
      CHECK_NOTHROW(
          parallel::spawn_threads([&](int rank, int) { body(*impatient_group(processes), rank); }, {.nthreads = 2}));
    };
    on_two([&](parallel::ProcessGroup& g, int rank) {
      Tensor t = ones({4});
      for (int i = 0; i < 2; ++i) (rank == 0 ? g.recv(t, 1) : g.send(t, 0)).wait();
      g.barrier().wait();
      if (rank == 1) return wait_for(1);
      require_error(
          "rank 0 of 2: " + waited("recv (from 1, call 3) of {4} float32 for rank 1 (last seen in barrier (call 1)), "
                                   "which is stopped, slow"),
          [&] { g.recv(t, 1).wait(); });
      stage = 1;
    });
    on_two([&](parallel::ProcessGroup& g, int rank) {  // two ranks that wait for each other
      Tensor t = ones({4});
      try {
        g.recv(t, 1 - rank).wait();
        require(false, "an error");
      } catch (const CommError& e) {
        const std::string_view text = e.what();
        const auto here = fmt::format("recv (from {}, call 1) of {{4}} float32", 1 - rank);
        const auto there = fmt::format(
            "for rank {} (it has started recv (from {}, call 1) of {{4}} float32, which this "
            "rank has not)",
            1 - rank, rank);
        require(text.find(here) != text.npos, text);
        require(text.find(fmt::format("given up on rank {}", rank)) != text.npos || text.find(there) != text.npos,
                text);
      }
    });
    on_two([&](parallel::ProcessGroup& g, int rank) {  // one that stops in the middle
      Tensor t = full({3'000'000}, rank + 1.0);
      if (rank == 0) {
        const parallel::Work work = g.recv(t, 1);
        stage = 1;
        wait_for(2);
        require_error("rank 0 of 2: " +
                          waited("recv (from 1, call 1) of {3000000} float32 for rank 1 (it has started send (to 0, "
                                 "call 1) of {3000000} float32, but has not waited for it or asked for it since)"),
                      [&] { work.wait(); });
        const Tensor then = t.clone();
        require(t[0].item<double>() == 2 && t[2'999'999].item<double>() == 1, "a part has come");
        stage = 3;
        wait_for(4);
        require(same_bits(t, then), "the tensor stays");
      } else {
        wait_for(1);
        const parallel::Work work = g.send(t, 0);
        stage = 2;
        wait_for(3);
        require_error("given up on rank 1", [&] { work.wait(); });
        stage = 4;
        require(same_bits(t, full({3'000'000}, 2.0)), "what is sent stays");
      }
    });
  }
}

TEST_CASE("a rank that does not make a group is named") {
  CHECK_ERROR(parallel::spawn_threads(
                  [](int rank, int) {
                    if (rank == 0) parallel::init_process_group({.timeout_seconds = 0.2});
                  },
                  {.nthreads = 2}),
              "rank 0 of 2: waited 0.2 s in barrier (call 0) for rank 1 (not seen yet), which is stopped");
}
