// Process groups of threads: every operation, asynchronous works, several groups, and their store.
#include <thread>

#include <tandem/parallel/comm/combine.h>
#include <tandem/parallel/comm/hash_store.h>
#include <tandem/parallel/comm/peer_wait.h>
#include <tandem/parallel/comm/store_limits.h>
#include <tandem/tandem.h>
#include <tandem/tests/parallel/collective_cases.h>
#include <tandem/tests/parallel/thread_ranks.h>
#include <tandem/tests/support/test.h>

using namespace tandem;
using test::on_ranks;
using test::require;
using test::require_error;
using test::same_bits;

TEST_CASE("collectives equal a plain computation on 1 to 4 ranks, bit by bit") {
  for (const int n : {1, 2, 3, 4}) {
    CAPTURE(n);
    CHECK_NOTHROW(on_ranks(n, [](parallel::ProcessGroup& g) { test::collective_cases(g, 5000); }));
  }
}

TEST_CASE("memory that processes share, used by threads") {
  for (const int n : {1, 3}) {
    CAPTURE(n);
    auto run = [](int rank, int ranks) {
      parallel::GroupSetup setup{.store = parallel::t_thread_rank->store, .name = "g", .world_rank = rank};
      for (int r = 0; r < ranks; ++r) setup.ranks.push_back(r);
      const auto group = parallel::make_shm_group(setup);
      test::collective_cases(*group, 70'001);
      test::order_cases(*group);
      test::message_cases(*group, 300'001);
      test::argument_cases(*group);
    };
    CHECK_NOTHROW(parallel::spawn_threads(run, {.nthreads = n}));
  }
}

TEST_CASE("combining many ranks' values follows the tree, also where the result replaces one of them") {
  for (const int ranks : {1, 5, 8, 11})
    for (const parallel::ReduceOp op : {parallel::ReduceOp::sum, parallel::ReduceOp::avg, parallel::ReduceOp::max})
      for (const DType dtype : {float32, bfloat16, float16, float64})
        for (int replaced = -1; replaced < ranks; replaced += 3) {
          std::vector<Tensor> tensors;
          for (int r = 0; r < ranks; ++r) tensors.push_back(test::values_of(r, 2500, dtype));
          const Tensor expected = test::combined(tensors, op);
          Tensor other = empty({2500}, {.dtype = dtype});
          std::vector<const void*> parts;
          for (const Tensor& t : tensors) parts.push_back(t.raw().data);
          std::vector<void*> outputs{other.raw_for_write().data};
          if (replaced >= 0)
            outputs.insert(outputs.begin(), tensors[static_cast<std::size_t>(replaced)].raw_for_write().data);
          parallel::combine(dtype, op, parts, outputs, 2500);
          CHECK(same_bits(other, expected));
          if (replaced >= 0) CHECK(same_bits(tensors[static_cast<std::size_t>(replaced)], expected));
        }
}

TEST_CASE("order of works, errors and disagreements") {
  for (const int n : {1, 2, 3, 4}) {
    CAPTURE(n);
    CHECK_NOTHROW(on_ranks(n, [](parallel::ProcessGroup& g) { test::order_cases(g); }));
  }
}

TEST_CASE("messages, all_to_all, and wrong arguments") {
  for (const int n : {1, 2, 3, 8}) {
    CAPTURE(n);
    CHECK_NOTHROW(on_ranks(n, [n](parallel::ProcessGroup& g) {
      test::message_cases(g, n < 8 ? 300'001 : 20'001);
      test::argument_cases(g);
      std::vector<int> all;
      for (int r = 0; r < g.size(); ++r) all.push_back(r);
      test::messages_in_two_groups(g, *parallel::new_group(all));
    }));
  }
}

TEST_CASE("ranks may wait for works of two groups in opposite orders") {
  on_ranks(3, [](parallel::ProcessGroup& all) {
    const auto other = parallel::new_group({0, 1, 2});
    for (int i = 0; i < 20; ++i) {
      Tensor a = ones({100}), b = full({50}, 2.0);
      const auto first = all.all_reduce(a), second = other->all_reduce(b);
      if (all.rank() % 2 == 0) {
        first.wait();
        second.wait();
      } else {
        second.wait();
        first.wait();
      }
      require(same_bits(a, full({100}, 3.0)) && same_bits(b, full({50}, 6.0)), "sums in two groups");
    }
  });
}

TEST_CASE("groups of some ranks, and many of them") {
  on_ranks(3, [](parallel::ProcessGroup& all) {
    const int me = all.rank();
    const auto outer = parallel::new_group({0, 2});
    CHECK(outer->size() == 2);
    if (me == 1) {
      require(outer->rank() == -1, "rank of a non-member");
      require_error("not a member of the group", [&] { outer->barrier(); });
      Tensor both = ones({2});
      require_error("not a member of the group", [&] { outer->all_gather(both, ones({1})); });
    } else {
      Tensor t = full({2}, 1.0 * me);
      outer->all_reduce(t).wait();
      require(same_bits(t, full({2}, 2.0)), "sum of two of three ranks");
      require(outer->rank() == me / 2, "rank in a group");
      require_error("root 2 is out of range", [&] { outer->broadcast(t, 2); });
      // Errors name the others by their numbers in the job, too.
      Tensor other = ones({2 + me});
      require_error(me == 2 ? "rank 1 of 2: the ranks disagree: rank 1 (rank 2 of the job) calls all_reduce"
                            : ", rank 1 (rank 2 of the job) calls all_reduce",
                    [&] { outer->all_reduce(other).wait(); });
    }
    std::vector<std::shared_ptr<parallel::ProcessGroup>> groups;
    for (int i = 0; i < 40; ++i) groups.push_back(parallel::new_group({0, 1, 2}));
    for (const auto& g : groups) {
      Tensor t = ones({1});
      g->all_reduce(t).wait();
      require(t.item<int>() == 3, "sum in one of many groups");
    }
  });
}

TEST_CASE("joining and leaving again and again") {
  parallel::spawn_threads(
      [](int rank, int n) {
        for (int i = 0; i < 20; ++i) {
          require(!parallel::is_initialized(), "not joined");
          parallel::init_process_group();
          require(parallel::rank() == rank && parallel::world_size() == n, "rank and size");
          require_error("joined already", [] { parallel::init_process_group(); });
          Tensor t = ones({2});
          parallel::all_reduce(t);
          require(same_bits(t, full({2}, 1.0 * n)), "sum");
          parallel::destroy_process_group();
        }
      },
      {.nthreads = 3});
}

TEST_CASE("a rank whose joining has failed is told that it cannot join again") {
  parallel::spawn_threads(
      [](int, int) {
        parallel::init_process_group();
        parallel::destroy_process_group();
        parallel::t_thread_rank->store->add("joins/0", 1);  // as a joining does that then fails
        for (int i = 0; i < 2; ++i)
          require_error("[init_process_group] rank 0 has tried to join this job before, and has failed",
                        [] { parallel::init_process_group(); });
      },
      {.nthreads = 1});
}

TEST_CASE("a group that is destroyed ends what was started; works outlive it") {
  parallel::spawn_threads(
      [](int, int n) {
        parallel::init_process_group();
        Tensor t = ones({2});
        const parallel::Work work = parallel::all_reduce(t, {.async_op = true});
        parallel::destroy_process_group();
        require(work.is_completed() && same_bits(t, full({2}, 1.0 * n)), "sum after the end of the group");
        work.wait();
      },
      {.nthreads = 3});
}

TEST_CASE("tensors of a group outlive it") {
  Tensor kept;
  on_ranks(2, [&](parallel::ProcessGroup& g) {
    Tensor t = g.allocate({3}, float32);
    require(same_bits(t, zeros({3})), "allocated memory is zero");
    t.fill_(g.rank() + 1);
    g.all_reduce(t).wait();
    if (g.rank() == 0) kept = t;
  });
  CHECK(same_bits(kept, full({3}, 3.0)));
}

TEST_CASE("a result counts as a change of the tensor") {
  on_ranks(2, [](parallel::ProcessGroup& g) {
    Tensor t = ones({2});
    const auto before = t.version();
    g.all_reduce(t).wait();
    require(t.version() != before, "version");
  });
}

TEST_CASE("each thread that is a rank has its own random numbers under one seed") {
  manual_seed(5);
  Tensor drawn[2];
  parallel::spawn_threads([&](int rank, int) { drawn[rank] = rand({4}); }, {.nthreads = 2});
  CHECK(!equal(drawn[0], drawn[1]));
}

TEST_CASE("the store of threads") {
  parallel::HashStore store(0.05);
  store.set("a", "1");
  CHECK(store.get("a") == "1");
  CHECK(store.check("a"));
  CHECK(!store.check("b"));
  CHECK(store.add("a", 4) == 5);
  CHECK(store.add("new", -2) == -2);
  CHECK(store.compare_set("c", "", "x") == "x");
  CHECK(store.compare_set("c", "y", "z") == "x");
  CHECK(store.compare_set("c", "x", "z") == "z");
  CHECK(store.compare_set("missing", "x", "z").empty());
  CHECK(store.num_keys() == 3);
  CHECK(store.remove("c"));
  CHECK(!store.remove("c"));
  for (const std::string& bad : {std::string(), std::string(2000, 'k')}) {
    CHECK_ERROR(store.get(bad), "key");
    CHECK_ERROR(store.check(bad), "key");
    CHECK_ERROR(store.remove(bad), "key");
  }
  CHECK_ERROR(store.compare_set("c", std::string(9 << 20, 'v'), "x"), "bytes");
  CHECK_ERROR(store.get("never"), "waited 0.05 s for the key 'never'");
  store.set("text", "x");
  CHECK_ERROR(store.add("text", 1), "not a number");
  std::thread setter([&] { store.set("late", "here"); });
  CHECK(parallel::HashStore(1).num_keys() == 0);
  CHECK(store.get("a") == "5");
  setter.join();
  CHECK(store.get("late") == "here");
  store.set("ended/3", "has failed");
  CHECK_ERROR(store.get("never"), "rank 3 has failed while this rank waited for the key 'never'");
}

TEST_CASE("ranks on two hosts get an error that names both") {
  parallel::GroupSetup setup{.store = std::make_shared<parallel::HashStore>(), .name = "g", .ranks = {0, 1}};
  setup.store->set("g/shm/1", "1 -1 0 other-machine another-boot");
  CHECK_ERROR(parallel::make_shm_group(setup), "rank 0 is on host '", "rank 1 on 'other-machine'", "gloo");
  setup.store->set("g/shm/1", "");
  setup.store->remove("g/shm/1");
  setup.store->set("ended/1", "was killed by signal 9");
  CHECK_ERROR(parallel::make_shm_group(setup), "rank 0 of 2: rank 1 was killed by signal 9 before it made the group");
  setup.store->remove("ended/1");
  setup.timeout_seconds = 0.1;
  CHECK_ERROR(parallel::make_shm_group(setup), "waited 0.1 s for rank 1 to make the group");
}

TEST_CASE("waiting for the members of a group has one time for all, and ends with a member") {
  parallel::GroupSetup setup{.store = std::make_shared<parallel::HashStore>(), .ranks = {1, 4, 7}, .world_rank = 1};
  setup.timeout_seconds = 0.05;
  int calls = 0;
  const auto meanwhile = [&] { ++calls; };
  const parallel::PeerWait others(setup);
  setup.store->set("first", "here");
  CHECK(others.value_of("first", 1, meanwhile) == "here");
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  CHECK_ERROR(others.value_of("second", 2, meanwhile),
              "rank 0 of 3: waited 0.05 s for rank 2 (rank 7 of the job) to make the group");
  CHECK(calls == 0);
  setup.timeout_seconds = 30;
  setup.store->set("ended/7", std::string(parallel::kHasLeft));
  CHECK_ERROR(others.value_of("second", 2, meanwhile),
              "rank 0 of 3: rank 2 (rank 7 of the job) has left the job before it made the group");
  setup.store->set("second", "here");
  CHECK(others.value_of("second", 2, meanwhile) == "here");
}
