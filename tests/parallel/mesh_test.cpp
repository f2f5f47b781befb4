// Groups over a mesh between threads: collectives, messages, several hosts, and what goes over the mesh.
#include <atomic>
#include <chrono>
#include <thread>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/comm/mesh_hosts.h>
#include <tandem/tandem.h>
#include <tandem/tests/parallel/collective_cases.h>
#include <tandem/tests/parallel/local_mesh.h>
#include <tandem/tests/parallel/mesh_cases.h>
#include <tandem/tests/support/test.h>

using namespace tandem;
using parallel::CommError;
using parallel::Work;
using test::require;
using test::require_error;
using test::same_bits;

namespace {

// A name that no other group has had.
std::string new_name() {
  static std::atomic<int> count = 0;
  return fmt::format("group{}", count++);
}

std::shared_ptr<parallel::ProcessGroup> make_group(const std::string& name, const std::vector<int>& hosts,
                                                   double timeout_seconds = 60, std::vector<int> ranks = {}) {
  parallel::GroupSetup setup{.store = parallel::t_thread_rank->store,
                             .name = name,
                             .ranks = std::move(ranks),
                             .hosts = hosts,
                             .world_rank = parallel::t_thread_rank->rank,
                             .timeout_seconds = timeout_seconds};
  const int all = setup.ranks.empty() ? parallel::t_thread_rank->world_size : 0;
  for (int r = 0; r < all; ++r) setup.ranks.push_back(r);
  return parallel::make_mesh_group(setup, "local", [](const parallel::GroupSetup& s, int rank) {
    return std::unique_ptr<parallel::Mesh>(std::make_unique<test::LocalMesh>(s, rank));
  });
}

// Calls body(group) on each rank.
template <class Body>
void on_ranks(int n, const Body& body, double timeout_seconds = 60) {
  const std::string name = new_name();
  parallel::spawn_threads([&](int, int) { body(*make_group(name, {}, timeout_seconds)); }, {.nthreads = n});
}

void wait_for(const std::atomic<bool>& flag) {
  for (int i = 0; !flag && i < 20'000; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  require(flag, "the other rank has come so far");
}

// The tree over lo .. hi-1, whose leaves are given.
std::string tree(const std::vector<std::string>& leaves, std::size_t lo, std::size_t hi) {
  if (hi - lo == 1) return leaves[lo];
  const std::size_t middle = lo + (hi - lo + 1) / 2;
  return fmt::format("({} {})", tree(leaves, lo, middle), tree(leaves, middle, hi));
}

}  // namespace

TEST_CASE("collectives and messages over a mesh") {
  for (const int n : {1, 2, 3, 4}) {
    CAPTURE(n);
    CHECK_NOTHROW(on_ranks(n, [](parallel::ProcessGroup& g) {
      for (int d = 0; d < kDTypeCount; ++d) test::collective_cases_of(g, static_cast<DType>(d), 1100);
      test::order_cases(g);
      test::message_cases(g, 70'001);
      test::argument_cases(g);
      test::messages_between_all(g);
      test::parts_between_all(g);
    }));
  }
}

TEST_CASE("which hosts combine in the one tree: every way to lay up to 9 ranks on hosts") {
  int in_tree = 0;
  for (int n = 1; n <= 9; ++n)
    for (int cuts = 0; cuts < 1 << (n - 1); ++cuts) {
      std::vector<int> hosts{0};
      for (int r = 1; r < n; ++r) hosts.push_back((cuts >> (r - 1) & 1) != 0 ? r : hosts.back());
      std::vector<std::string> ranks, inside;
      for (int r = 0; r < n; ++r) ranks.push_back(fmt::format("{}", r));
      for (std::size_t r = 0; r < ranks.size();) {
        std::size_t end = r;
        while (end < ranks.size() && hosts[end] == hosts[r]) ++end;
        inside.push_back(tree(ranks, r, end));
        r = end;
      }
      const parallel::HostPlan plan = parallel::plan_hosts(hosts);
      CAPTURE(hosts);
      CHECK(plan.in_tree == (tree(ranks, 0, ranks.size()) == tree(inside, 0, inside.size())));
      CHECK(plan.hosts.size() == inside.size());
      CHECK(plan.worth_it == (inside.size() > 1 && inside.size() < ranks.size()));
      in_tree += plan.in_tree ? 1 : 0;
    }
  CHECK(in_tree > 20);
  CHECK_FALSE(parallel::plan_hosts({0, 1, 0}).in_tree);
  CHECK(parallel::plan_hosts({0, 1, 0}).hosts == std::vector<std::vector<int>>{{0, 2}, {1}});
}

TEST_CASE("several hosts: the same bits, and leaders alone send data between hosts") {
  for (const test::HostLayout& layout : test::host_layouts()) {
    const int n = static_cast<int>(layout.hosts.size());
    CAPTURE(layout.hosts);
    CHECK(parallel::plan_hosts(layout.hosts).in_tree == layout.in_tree);
    const std::string name = new_name();
    CHECK_NOTHROW(
        parallel::spawn_threads([&](int, int) { test::host_cases(*make_group(name, layout.hosts)); }, {.nthreads = n}));

    for (const DType dtype : {float32, bfloat16}) {
      const std::string counted = new_name();
      const std::int64_t bytes = 1 << 20;
      CHECK_NOTHROW(parallel::spawn_threads(
          [&](int, int) {
            Tensor t = ones({bytes / static_cast<std::int64_t>(size_of(dtype))}, {.dtype = dtype});
            make_group(counted, layout.hosts)->all_reduce(t).wait();
          },
          {.nthreads = n}));
      std::size_t all = 0, between_others = 0;
      for (const auto& [way, count] : test::LocalHub::of(counted).bytes) {
        all += count;
        const auto leads = [&](int r) { return r == 0 || layout.hosts[static_cast<std::size_t>(r)] == r; };
        if (!leads(way.first) || !leads(way.second)) between_others += count;
      }
      const auto hosts = parallel::plan_hosts(layout.hosts).hosts.size();
      if (layout.in_tree && dtype == float32) {
        CHECK(between_others == 0);
        CHECK(all == 2 * (hosts - 1) * static_cast<std::size_t>(bytes));
      } else {
        CHECK(between_others > 0);
        CHECK(all == 2 * static_cast<std::size_t>(n - 1) * static_cast<std::size_t>(bytes));
      }
    }
  }
}

TEST_CASE("a message that comes too late breaks the group, and all learn why") {
  std::atomic<bool> over = false;
  on_ranks(
      3,
      [&](parallel::ProcessGroup& g) {
        Tensor t = zeros({4});
        const int me = g.rank();
        if (me < 2) (me == 1 ? g.send(t, 0) : g.recv(t, 1)).wait();
        const auto require_blame = [&](const std::string& text, const auto& body) {
          require_error(text, [&] {
            try {
              body();
            } catch (const CommError& e) {
              require(e.rank() == 1, fmt::format("about rank 1: {}", e.what()));
              throw;
            }
          });
        };
        if (me == 0) {
          require_blame("rank 0 of 3: waited 1 s in recv (from 1, call 2) of {4} float32 for rank 1, which is stopped",
                        [&] { g.recv(t, 1).wait(); });
          over = true;
          require_blame("recv (from 1, call 2)", [&] { g.send(t, 2).wait(); });
        } else if (me == 1) {
          wait_for(over);
          require_blame(
              "rank 1 of 3: lost its connections in send (to 0, call 2) of {4} float32: the other ranks have "
              "found that it kept rank 0 waiting for 1 s in recv (from 1, call 2)",
              [&] { g.send(t, 0).wait(); });
        } else {
          wait_for(over);
          require_blame(
              "rank 2 of 3: rank 1 kept rank 0 waiting for 1 s in recv (from 1, call 2) of {4} float32 while "
              "this rank waited in recv (from 0, call 1)",
              [&] { g.recv(t, 0).wait(); });
        }
      },
      1);
}

TEST_CASE("a group that is destroyed waits for its messages, but not while an exception passes") {
  const std::string first = new_name(), second = new_name();
  std::atomic<bool> thrown = false;
  parallel::spawn_threads(
      [&](int rank, int) {
        Tensor t = full({100'000}, 1.0 * rank);
        Work work;
        {
          const auto group = make_group(first, {});
          work = rank == 0 ? group->recv(t, 1) : group->send(t, 0);
        }
        require(work.is_completed() && same_bits(t, ones({100'000})), "a message at the end of its group");

        auto group = make_group(second, {});
        if (rank == 0) {
          require_error("mine", [&] {
            const auto leaves = std::move(group);
            work = leaves->recv(t, 1);
            throw Error("mine");
          });
          require_error("rank 0 of 2: the group was destroyed in recv (from 1, call 1)", [&] { work.wait(); });
          parallel::t_thread_rank->store->set("ended/0", "has failed (mine)");
          thrown = true;
        } else {
          wait_for(thrown);
          require_error("rank 1 of 2: rank 0 has failed (mine) while this rank waited in send (to 0, call 1)",
                        [&] { group->send(t, 0).wait(); });
        }
      },
      {.nthreads = 2});
}

TEST_CASE("a group of some ranks: errors tell their numbers in the job, too; what the store says may be nonsense") {
  const std::string late = new_name(), broken = new_name();
  std::atomic<bool> over = false;
  CHECK_NOTHROW(parallel::spawn_threads(
      [&](int rank, int) {
        const auto first = make_group(late, {}, 1, {1, 2}), second = make_group(broken, {}, 60, {1, 2});
        if (rank == 2) wait_for(over);
        if (rank != 1) return;
        Tensor t = zeros({4});
        require_error(
            "rank 0 of 2: waited 1 s in recv (from 1, call 1) of {4} float32 for rank 1 (rank 2 of the job), ",
            [&] { first->recv(t, 1).wait(); });
        parallel::t_thread_rank->store->set(broken + "/lost", "7,-1,x,,99999999999|is mad");
        over = true;
        require_error("rank 0 of 2: rank 1 (rank 2 of the job) is mad while this rank waited in recv (from 1, call 1)",
                      [&] { second->recv(t, 1).wait(); });
      },
      {.nthreads = 3}));
}

TEST_CASE("who has left after doing its part is not to blame") {
  using namespace std::chrono_literals;
  const auto require_blame = [](int rank, const std::string& text, const auto& body) {
    require_error(text, [&] {
      try {
        body();
      } catch (const CommError& e) {
        require(e.rank() == rank, fmt::format("about rank {}: {}", rank, e.what()));
        throw;
      }
    });
  };
  for (const bool message : {false, true}) {
    CAPTURE(message);
    const std::string name = new_name();
    std::atomic<bool> left = false, seen = false;
    CHECK_NOTHROW(parallel::spawn_threads(
        [&](int rank, int) {
          auto group = make_group(name, {});
          group->barrier().wait();
          parallel::Store& store = *parallel::t_thread_rank->store;
          Tensor t = zeros({4});
          if (rank == 0) {
            wait_for(left);
            // A message is a matter of its peer alone. In a collective, rank 1 leaves for a reason that comes out
            // later.
            if (message)
              require_blame(1, "rank 0 of 3: rank 1 has closed its connection (closed) while this rank waited in recv",
                            [&] { group->recv(t, 1).wait(); });
            else
              require_blame(2, "rank 0 of 3: rank 2 was killed by signal 9 while this rank waited in barrier",
                            [&] { group->barrier().wait(); });
            seen = true;
          } else if (rank == 1) {
            group.reset();
            if (!message) store.set("ended/1", "ended with exit code 0");
            if (message) store.set("ended/2", "ended with exit code 0");
            left = true;
            wait_for(seen);
          } else {
            wait_for(left);
            std::this_thread::sleep_for(100ms);
            if (!message) store.set("ended/2", "was killed by signal 9");
            wait_for(seen);
          }
        },
        {.nthreads = 3}));
  }
}

TEST_CASE("several hosts: a member that is silent, and one that leaves while an exception passes") {
  for (const bool leaves : {false, true})
    for (const int missing : {0, 1, 2, 3}) {
      CAPTURE(leaves);
      CAPTURE(missing);
      const std::string name = new_name();
      std::atomic<int> seen = 0;
      CHECK_NOTHROW(parallel::spawn_threads(
          [&](int rank, int) {
            auto group = make_group(name, {0, 0, 2, 2}, leaves ? 60 : 1);
            Tensor t = ones({1'000'000});
            group->all_reduce(t).wait();
            if (rank != missing) {
              require_error(fmt::format("rank {}", missing), [&] {
                try {
                  for (;;) group->all_reduce(t, parallel::ReduceOp::max).wait();
                } catch (const CommError& e) {
                  require(e.rank() == missing, fmt::format("about rank {}: {}", missing, e.what()));
                  throw;
                }
              });
              ++seen;
              return;
            }
            if (leaves)
              require_error("mine", [&] {
                const auto own = std::move(group);
                const Work work = own->all_reduce(t, parallel::ReduceOp::max);
                parallel::t_thread_rank->store->set(fmt::format("ended/{}", rank), "has failed (mine)");
                throw Error("mine");
              });
            for (int i = 0; seen < 3 && i < 20'000; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          },
          {.nthreads = 4}));
      CHECK(seen == 3);
    }
}
