// Processes over Gloo: every collective, disagreements, and ranks that end, stop or are late. Ends with 1 on a fault.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <thread>

#include <tandem/tandem.h>
#include <tandem/tests/parallel/collective_cases.h>
#include <tandem/tests/parallel/mesh_cases.h>
#include <tandem/tests/parallel/proofs.h>

using namespace tandem;
using parallel::ReduceOp;
using test::prove;
using test::proved;
using test::require;
using test::require_error;
using test::run;
using test::wait_for_proofs;

// AddressSanitizer asks. A child of a rank that only ends leaves the group's memory alone, which is no leak.
extern "C" int __lsan_is_turned_off();

namespace {

constexpr int kRanks = 3;
bool in_child = false;

std::shared_ptr<parallel::ProcessGroup> join(double timeout_seconds = 60) {
  alarm(100);  // a rank that hangs is a fault
  parallel::init_process_group({.backend = "gloo", .timeout_seconds = timeout_seconds});
  require(parallel::default_group()->backend() == "gloo", "backend");
  return parallel::default_group();
}

// With a short time: when all are there already, so that it is not for the start of the processes.
void join_at_once(double timeout_seconds) {
  join();
  parallel::barrier();
  parallel::destroy_process_group();
  join(timeout_seconds);
}

// An error with this text about rank 2.
template <class Body>
void require_lost(std::string_view text, const Body& body) {
  require_error(text, [&] {
    try {
      body();
    } catch (const parallel::CommError& e) {
      require(e.rank() == 2, fmt::format("'{}' is about rank 2, not {}", e.what(), e.rank()));
      throw;
    }
  });
}

void collectives(int rank, int ranks) {
  const auto group = join();
  // The bits of every type and size are those of `combine`, which comm_test looks at.
  if (ranks == 3)
    for (int d = 0; d < kDTypeCount; ++d) test::collective_cases_of(*group, static_cast<DType>(d), 1100);
  else
    for (const std::int64_t count : {0, 1, 5, 1100, 9'001}) test::collective_cases_of(*group, float32, count);
  test::order_cases(*group);
  test::message_cases(*group, 70'001);
  test::argument_cases(*group);
  test::messages_between_all(*group);
  test::parts_between_all(*group);
  // Several pieces, which do not divide.
  const std::int64_t count = 1'100'003;
  const Tensor numbers = arange(count).to(float64);
  Tensor t = numbers * (rank + 1.0);
  parallel::all_reduce(t, {.op = ReduceOp::avg});
  require(equal(t, numbers * ((ranks + 1) / 2.0)), "average in pieces");
  Tensor part = zeros({count}, {.dtype = float64});
  parallel::reduce_scatter(part, arange(count * ranks).to(float64));
  require(equal(part, (numbers + double(count * rank)) * double(ranks)), "reduce_scatter in pieces");
  t = numbers.clone();
  parallel::reduce(t, ranks - 1);
  require(equal(t, rank == ranks - 1 ? numbers * double(ranks) : numbers), "reduce in pieces");
  Tensor large = full({ranks, 4}, 1.0 * rank);
  Tensor row = large.narrow(0, rank, 1);
  parallel::all_gather(large, row);  // the input is a part of the output
  for (int r = 0; r < ranks; ++r) require(test::same_bits(large[r], full({4}, 1.0 * r)), "gathered in place");
  std::vector<int> ends{0};
  if (ranks > 1) ends.push_back(ranks - 1);
  const auto pair = parallel::new_group(ends);
  if (pair->rank() >= 0) {
    t = full({1}, rank + 1.0);
    parallel::all_reduce(t, {.group = pair});
    require(t.item<double>() == (ranks > 1 ? 1.0 + ranks : 1.0), "sum in a group");
  } else {
    require_error("not a member", [&] { parallel::barrier({.group = pair}); });
  }
  parallel::destroy_process_group();
}

// Joins, leaves and joins again; groups of before do not disturb those of now.
void again(int rank, int ranks) {
  std::shared_ptr<parallel::ProcessGroup> kept;
  for (int i = 0; i < 5; ++i) {
    const auto group = join();
    Tensor t = full({2}, double(rank + i));
    parallel::all_reduce(t);
    require(test::same_bits(t, full({2}, ranks * i + ranks * (ranks - 1) / 2.0)), "sum");
    if (i == 2) kept = group;
    parallel::destroy_process_group();
    require_error("call init_process_group first", [] { (void)parallel::default_group(); });
  }
  kept->barrier().wait();
}

// pytorch/gloo#520: a rank ends; the others hung, and ignored the timeout.
void lost(int rank, std::string_view how, FunctionRef<void()> end, bool within) {
  join();
  Tensor t = ones({within ? 3'000'000 : 1000});
  parallel::all_reduce(t);
  if (rank == 2 && !within) end();
  if (rank == 2) std::thread([&] { std::this_thread::sleep_for(std::chrono::milliseconds(100)), end(); }).detach();
  const std::string text =
      fmt::format("rank {} of 3: rank 2 {} while this rank waited in all_reduce (sum, call", rank, how);
  require_lost(text, [&] {
    for (;;) parallel::all_reduce(t);
  });
  require_lost(text, [] { parallel::barrier(); });  // and so does every later call
  prove(rank);
  parallel::destroy_process_group();
}

// A rank that is busy does not keep the others from noticing that another has ended.
void lost_beside_a_busy_one(int rank) {
  join();
  if (rank == 2) raise(SIGKILL);
  // It is busy until the other survivor has seen the end, or a while longer than that may take.
  if (rank == 1) wait_for_proofs(getppid(), {0});
  require(rank == 0 || proved(getppid(), 0), "rank 0 has seen the end of rank 2 in time");
  require_lost("rank 2 was killed by signal 9", [] { parallel::barrier(); });
  prove(rank);
  parallel::destroy_process_group();
}

void silent(int rank, bool stopped) {
  join_at_once(1);
  const pid_t self = getpid(), launcher = getppid();
  if (rank == 2 && stopped) {
    if (fork() == 0) {  // wakes it when the others have given up
      wait_for_proofs(launcher, {0, 1});
      kill(self, SIGCONT);
      _exit(0);
    }
    raise(SIGSTOP);
  } else if (rank == 2) {
    wait_for_proofs(launcher, {0, 1});
  } else {
    require_lost("waited 1 s in barrier (call 1) for rank 2, which is stopped, slow", [] { parallel::barrier(); });
    require_lost("rank 2", [] { parallel::barrier(); });
  }
  if (rank == 2)
    require_lost("rank 2 of 3: came to barrier (call 1) after the other ranks had given up",
                 [] { parallel::barrier(); });
  prove(rank);
  parallel::destroy_process_group();
}

// A group that ends because an exception passes does not wait for what its peers owe it.
void unwinding(int rank) {
  join();
  auto own = parallel::new_group({0, 1, 2});
  const pid_t launcher = getppid();
  if (rank == 2) {
    Tensor t = ones({1000});
    parallel::Work work, queued;
    require_error("mine", [&] {
      const auto group = std::move(own);
      work = group->all_reduce(t);
      queued = group->barrier();
      throw Error("mine");
    });
    require_error("rank 2 of 3: the group was destroyed in all_reduce (sum, call 1", [&] { work.wait(); });
    require_error("rank 2 of 3: the group was destroyed", [&] { queued.wait(); });
  } else {
    require(wait_for_proofs(launcher, {2}), "rank 2 is through before the others come");
    require_error("rank", [&] { own->barrier().wait(); });
  }
  prove(rank);
  parallel::destroy_process_group();
}

// A child of a rank ends as any process does, and cannot act for the rank.
void forked(int rank) {
  join();
  const auto group = parallel::new_group({0, 1, 2});
  Tensor t = ones({1000});
  parallel::Work work;
  if (rank > 0) {
    parallel::barrier();
  } else {
    work = parallel::all_reduce(t, {.group = group, .async_op = true});
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      in_child = true;
      require_error("this process was forked from process", [] { parallel::barrier(); });
      require_error("this process was forked from process", [&] { work.wait(); });
      std::exit(7);
    }
    int status = 0;
    require(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7, "the child ends");
    parallel::barrier();
  }
  if (rank > 0) work = parallel::all_reduce(t, {.group = group, .async_op = true});
  work.wait();
  require(test::same_bits(t, full({1000}, 3.0)), "the rank goes on");
  parallel::destroy_process_group();
}

// Messages in several groups at once do not meet those of others.
void several_groups(int rank, int ranks) {
  join();
  std::vector<std::shared_ptr<parallel::ProcessGroup>> groups;
  for (int i = 0; i < 3; ++i) groups.push_back(parallel::new_group({0, 1, 2}));
  const int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  std::vector<Tensor> received(3);
  std::vector<parallel::Work> works;
  for (std::size_t i = 0; i < 3; ++i) {
    received[i] = zeros({1000});
    works.push_back(groups[i]->recv(received[i], previous));
  }
  for (std::size_t i = 3; i-- > 0;) groups[i]->send(full({1000}, 10.0 * rank + double(i)), next).wait();
  for (std::size_t i = 0; i < 3; ++i) {
    works[i].wait();
    require(test::same_bits(received[i], full({1000}, 10.0 * previous + double(i))), "messages of several groups");
  }
  parallel::destroy_process_group();
}

// Messages to and from rank 2, which ends while data move.
void lost_in_message(int rank) {
  join();
  Tensor t = ones({3'000'000}), u = ones({3'000'000});
  if (rank == 2) {
    std::thread([] { std::this_thread::sleep_for(std::chrono::milliseconds(100)), raise(SIGKILL); }).detach();
    for (;;) {
      const parallel::Work work = parallel::recv(u, 1, {.async_op = true});
      parallel::send(t, 0);
      work.wait();
    }
  }
  require_lost(fmt::format("rank {} of 3: rank 2 was killed by signal 9 (Killed) while this rank waited in {} 2, call",
                           rank, rank == 0 ? "recv (from" : "send (to"),
               [&] {
                 for (;;) (rank == 0 ? parallel::recv(t, 2) : parallel::send(t, 2)).wait();
               });
  require_lost("rank 2 was killed", [&] { parallel::barrier(); });
  require_lost("rank 2 was killed", [&] { parallel::send(t, 1 - rank); });
  prove(rank);
  parallel::destroy_process_group();
}

// Rank 2 does not send in time, though it is alive.
void late_message(int rank) {
  join_at_once(1);
  const pid_t launcher = getppid();
  Tensor t = zeros({4});
  if (rank == 2) {
    wait_for_proofs(launcher, {0, 1});
    require_lost(
        "rank 2 of 3: lost its connections in send (to 0, call 1) of {4} float32: the other ranks have found "
        "that it kept rank 0 waiting for 1 s in recv (from 2, call 1) of {4} float32",
        [&] { parallel::send(t, 0); });
  } else if (rank == 0) {
    // What else is under way fails for the same reason.
    const parallel::Work work = parallel::recv(t, 2, {.async_op = true});
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    const std::string text =
        "rank 0 of 3: waited 1 s in recv (from 2, call 1) of {4} float32 for rank 2, which is stopped, slow";
    require_lost(text, [] { parallel::barrier(); });
    require_lost(text, [&] { work.wait(); });
  } else {
    wait_for_proofs(launcher, {0});
    require_lost("rank 1 of 3: rank 2 kept rank 0 waiting for 1 s in recv (from 2, call 1)",
                 [&] { parallel::recv(t, 0); });
  }
  prove(rank);
  parallel::destroy_process_group();
}

// What a rank has sent arrives, though it leaves at once and the other reads slowly.
void leaving_at_once(int rank) {
  join();
  Tensor t = full({6 << 20}, rank == 0 ? 7.0 : 0.0), u = t.clone();
  if (rank == 0) {
    parallel::broadcast(t, 0);
    parallel::send(u, 1);
    parallel::destroy_process_group();
    return;
  }
  const pid_t self = getpid();
  if (fork() == 0) {
    for (int i = 0; i < 20; ++i) {
      kill(self, SIGSTOP);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      kill(self, SIGCONT);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    _exit(0);
  }
  parallel::broadcast(t, 0);
  parallel::recv(u, 0);
  require(equal(t, full({6 << 20}, 7.0)) && equal(u, t), "data of a rank that has left");
  parallel::destroy_process_group();
}

// Seconds of processor time that a process has used; no more once it has ended.
double used_by(pid_t process) {
  clockid_t clock;
  timespec t{};
  if (clock_getcpuclockid(process, &clock) != 0 || clock_gettime(clock, &t) != 0) return 1e9;
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// The timeout is for a silent rank, not for a whole collective: rank 2 pauses several times while data move. Between
// the pauses it gets some work done, however busy the machine is.
void pausing(int rank) {
  join_at_once(3);
  const pid_t self = getpid();
  if (rank == 2 && fork() == 0) {
    for (int i = 0; i < 3; ++i) {
      kill(self, SIGSTOP);
      std::this_thread::sleep_for(std::chrono::milliseconds(1100));
      kill(self, SIGCONT);
      for (const double before = used_by(self); used_by(self) < before + 0.15;)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    _exit(0);
  }
  Tensor t = full({32 << 20}, rank + 1.0);
  parallel::all_reduce(t);
  require(equal(t, full({32 << 20}, 6.0)), "sum of a rank that pauses");
  parallel::destroy_process_group();
}

}  // namespace

extern "C" int __lsan_is_turned_off() { return in_child ? 1 : 0; }

int main() {
  int faults = 0;
  for (const int ranks : {1, 2, 3, 4}) faults += run("collectives", 0, {}, collectives, ranks);
  faults += run("again", 0, {}, again, kRanks);
  faults += run("several groups", 0, {}, several_groups, kRanks);
  faults += run(
      "forked", 0, {}, [](int r, int) { forked(r); }, kRanks);
  faults += run(
      "lost in a message", 137, {0, 1}, [](int r, int) { lost_in_message(r); }, kRanks);
  faults += run(
      "late message", 0, {0, 1, 2}, [](int r, int) { late_message(r); }, kRanks);
  faults += run(
      "leaving at once", 0, {}, [](int r, int) { leaving_at_once(r); }, 2);
  const auto raise_kill = [] { raise(SIGKILL); };
  constexpr const char* kKilled = "was killed by signal 9 (Killed)";
  faults += run(
      "killed", 137, {0, 1}, [&](int r, int) { lost(r, kKilled, raise_kill, false); }, kRanks);
  faults += run(
      "killed within", 137, {0, 1}, [&](int r, int) { lost(r, kKilled, raise_kill, true); }, kRanks);
  faults += run(
      "code 3", 3, {0, 1},
      [](int r, int) {
        lost(
            r, "ended with exit code 3", [] { _exit(3); }, true);
      },
      kRanks);
  faults += run(
      "code 0", 0, {0, 1},
      [](int r, int) {
        lost(
            r, "ended with exit code 0", [] { _exit(0); }, false);
      },
      kRanks);
  const auto leave = [] {
    parallel::destroy_process_group();
    wait_for_proofs(getppid(), {0, 1});
    _exit(0);
  };
  faults += run(
      "left", 0, {0, 1}, [&](int r, int) { lost(r, "has left the job", leave, false); }, kRanks);
  faults += run(
      "beside a busy one", 137, {0, 1}, [](int r, int) { lost_beside_a_busy_one(r); }, kRanks);
  faults += run(
      "slow", 0, {0, 1, 2}, [](int r, int) { silent(r, false); }, kRanks);
  faults += run(
      "unwinding", 0, {0, 1, 2}, [](int r, int) { unwinding(r); }, kRanks);
  faults += run(
      "pausing", 0, {}, [](int r, int) { pausing(r); }, kRanks);
  faults += run(
      "stopped", 0, {0, 1, 2}, [](int r, int) { silent(r, true); }, kRanks);
  return faults == 0 ? 0 : 1;
}
