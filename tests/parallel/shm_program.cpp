// Processes over shared memory: collectives, ranks that are killed, stopped or gone, and nothing left behind. Ends with
// 1 on a fault.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/comm/secret.h>
#include <tandem/parallel/comm/tcp_store.h>
#include <tandem/tandem.h>
#include <tandem/tests/parallel/collective_cases.h>
#include <tandem/tests/parallel/proofs.h>

using namespace tandem;
using parallel::CommError;
using test::require;
using test::require_error;

namespace {

std::shared_ptr<parallel::ProcessGroup> join(double timeout_seconds = 30) {
  parallel::init_process_group({.backend = "shm", .timeout_seconds = timeout_seconds});
  return parallel::default_group();
}

// Files and mappings of this process that are shared memory.
int shared_files() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    count += std::filesystem::read_symlink(entry.path(), gone).string().find("memfd:tandem") != std::string::npos;
  }
  return count;
}
int mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:tandem") != std::string::npos;
  return count;
}

void collectives(int, int ranks) {
  {
    const auto group = join();
    test::collective_cases(*group, 70'001);
    test::order_cases(*group);
    test::message_cases(*group, 300'001);
    test::argument_cases(*group);
    std::vector<int> all;
    for (int r = 0; r < ranks; ++r) all.push_back(r);
    test::messages_in_two_groups(*group, *parallel::new_group(all));
    require(shared_files() == 0 && mappings() > 0, "files are closed once they are mapped");
  }
  parallel::destroy_process_group();
  require(mappings() == 0, "memory is released");
}

void memory(int rank, int) {
  Tensor kept;
  {
    const auto group = join();
    Tensor t = group->allocate({1000, 3}, float32);
    require(test::same_bits(t, zeros({1000, 3})), "allocated memory is zero");
    Tensor part = t.narrow(0, 10, 500);
    const void* const address = part.raw().data;
    part.fill_(rank + 1.0);
    const auto version = t.version();
    group->all_reduce(part).wait();
    require(part.raw().data == address && t.version() != version, "in place");
    require(test::same_bits(part, full({500, 3}, 6.0)), "sum of a part");
    require(test::same_bits(t.narrow(0, 0, 10), zeros({10, 3})), "the rest stays");
    require(group->allocate({0, 4}, int64).numel() == 0, "an empty tensor");
    require_error("shared memory on each of 3 ranks cannot be had: Cannot allocate memory on rank 0",
                  [&] { (void)group->allocate({std::int64_t{1} << 50}, float32); });
    // What no rank uses any more goes with the next allocation; the rest stays in its place.
    const int before = mappings();
    for (int i = 0; i < 5; ++i) {
      Tensor next = group->allocate({50'000}, float32);
      require(mappings() == before + 1, "unused memory is released");
      next.fill_(rank + 1.0);
      group->all_reduce(next).wait();
      require(test::same_bits(next, full({50'000}, 6.0)), "sum in later memory");
    }
    Tensor held = group->allocate({50'000}, float32), other;
    if (rank == 1) other = held;  // one rank keeps it, so all can reach it
    held = group->allocate({50'000}, float32);
    require(mappings() == before + 2, "memory that one rank uses stays");
    (rank == 1 ? other : held).fill_(rank + 1.0);
    group->all_reduce(rank == 1 ? other : held).wait();
    require(test::same_bits(rank == 1 ? other : held, full({50'000}, 6.0)), "sum in two allocations");
    part.fill_(rank + 1.0);
    group->all_reduce(part).wait();
    require(test::same_bits(part, full({500, 3}, 6.0)), "sum in the first memory");
    group->barrier().wait();
    held = other = Tensor();
    kept = t;
  }
  parallel::destroy_process_group();
  kept.fill_(7.0);
  require(test::same_bits(kept, full({1000, 3}, 7.0)) && mappings() == 1, "a tensor keeps its memory");
  kept = Tensor();
  require(mappings() == 0, "memory is released with the last tensor");
}

void many(int rank, int) {
  for (int i = 0; i < 5; ++i) {
    const auto all = join();
    std::vector<std::shared_ptr<parallel::ProcessGroup>> groups;
    for (int k = 0; k < 20; ++k)
      groups.push_back(parallel::new_group(k % 2 == 0 ? std::vector{0, 1, 2} : std::vector{0, 2}));
    std::vector<Tensor> tensors;
    std::vector<parallel::Work> works;
    for (const auto& g : groups) {
      tensors.push_back(full({40'000}, rank + 1.0));
      if (g->rank() >= 0) works.push_back(g->all_reduce(tensors.back()));
    }
    if (rank == 0) std::reverse(works.begin(), works.end());
    for (const auto& w : works) w.wait();
    for (std::size_t k = 0; k < groups.size(); ++k)
      if (groups[k]->rank() >= 0)
        require(test::same_bits(tensors[k], full({40'000}, k % 2 == 0 ? 6.0 : 4.0)), "sums in many groups");
    groups.clear();
    parallel::destroy_process_group();
  }
}

// A rank that makes a group still does its share of what others wait for before they come.
void late_group(int rank, int) {
  const auto all = join(10);
  Tensor t = full({100'000}, rank + 1.0);
  const parallel::Work work = all->all_reduce(t);
  if (rank != 0) work.wait();
  const auto group = parallel::new_group({0, 1, 2});
  work.wait();
  require(test::same_bits(t, full({100'000}, 6.0)), "sum before a new group");
}

bool proved(int rank) { return std::filesystem::remove(test::proof(getpid(), rank)); }

// Rank 2 ends by `end` while the others need it, and they see `text` within 2 s. Where it begins the call first, that
// may_pass.
void lose_rank(int rank, const std::function<void()>& end, std::string_view text, bool may_pass = false) {
  const auto group = join();
  Tensor large = full({300'000}, rank + 1.0);
  group->all_reduce(large).wait();
  require(test::same_bits(large, full({300'000}, 6.0)), "sum before the end");
  const parallel::Work work = rank == 2 ? parallel::Work() : group->all_reduce(large);
  if (rank == 2) end();
  const auto start = std::chrono::steady_clock::now();
  bool passed = false;
  try {
    work.wait();
    passed = true;
  } catch (const CommError& e) {
    require(e.rank() == 2, "the rank of the error");
    require(std::string_view(e.what()).starts_with(fmt::format("rank {} of 3: rank 2 {}", rank, text)), e.what());
  }
  if (passed) {  // the others were at work before rank 2 began, so that its beginning was its whole share
    require(may_pass, "an error");
    require_error("rank 2 was killed by signal 9 (Killed) while this rank waited in barrier",
                  [&] { group->barrier().wait(); });
    test::prove(rank);
    return;
  }
  require(std::chrono::steady_clock::now() - start < std::chrono::seconds(2), "in time");
  const parallel::Work later = group->barrier();  // starts well, and has ended at once
  require(later.is_completed(), "a call after a loss has ended");
  require_error(text, [&] { later.wait(); });
  test::prove(rank);
}

// Rank 2 is killed between messages, or inside a long one, and each of the others sees it within 2 s.
void lose_peer(int rank, bool within) {
  const auto group = join();
  const int next = (rank + 1) % 3, before = (rank + 2) % 3;
  const Tensor mine = full({5'000'000}, rank + 1.0);
  Tensor theirs = zeros({5'000'000}), sum = ones({10}), unsent = ones({10});
  {
    const parallel::Work sent = group->send(mine, next);
    group->recv(theirs, before).wait();
    sent.wait();
    require(test::same_bits(theirs, full({5'000'000}, before + 1.0)), "a message before the end");
  }
  if (rank == 2) {
    theirs.zero_();
    parallel::Work sent, received;
    if (within) {
      sent = group->send(mine, 0);
      received = group->recv(theirs, 1);
      while (theirs[2'000'000].item<double>() != 2) (void)received.is_completed();  // asking moves it on
    }
    kill(getpid(), SIGKILL);
  }
  theirs.zero_();
  const parallel::Work work = rank == 0 ? group->recv(theirs, 2) : group->send(mine, 2);
  const parallel::Work reduced = group->all_reduce(sum), idle = group->recv(unsent, 1 - rank);
  const auto start = std::chrono::steady_clock::now();
  const std::string what =
      fmt::format("rank {} of 3: rank 2 was killed by signal 9 (Killed) while this rank waited in ", rank);
  for (const parallel::Work& w : {reduced, idle}) require_error(what, [&] { w.wait(); });
  // Where rank 2 did not get the processor for long, the whole message has passed.
  if (!within || work.exception() != nullptr) require_error(what, [&] { work.wait(); });
  require(std::chrono::steady_clock::now() - start < std::chrono::seconds(2), "in time");
  test::prove(rank);
}

void killed(int rank, int) {
  lose_rank(
      rank,
      [] {
        Tensor large = ones({300'000});
        const parallel::Work work = parallel::default_group()->all_reduce(large);  // it has begun
        kill(getpid(), SIGKILL);
      },
      "was killed by signal 9 (Killed) while this rank waited in all_reduce (sum, call", true);
}

// pytorch/gloo#520, horovod/horovod#2564: a rank leaves before the first collective, or after one, with success.
void left(int rank, int) {
  lose_rank(
      rank, [] { _exit(0); }, "ended with exit code 0 while this rank waited in all_reduce (sum, call");
}

// A rank fails, catches what it threw, and ends with something pending: it does not wait for that, and is named.
void pending_at_the_end(int rank, const std::string& backend) {
  try {
    parallel::init_process_group({.backend = backend});
  } catch (const Error& e) {
    require(std::string_view(e.what()).find("is not built in") != std::string_view::npos, e.what());
    test::prove(rank);
    throw;
  }
  Tensor t = zeros({3});
  static parallel::Work work;  // as what a model or an optimizer keeps
  if (rank == 0) {
    work = parallel::recv(t, 1, {.async_op = true});
    throw Error("[test] a fault of this rank");
  }
  const auto start = std::chrono::steady_clock::now();
  try {
    parallel::all_reduce(t);
    require(false, "an error");
  } catch (const CommError& e) {
    require(e.rank() == 0, e.what());
  }
  require(std::chrono::steady_clock::now() - start < std::chrono::seconds(10), "in time");
  test::prove(rank);
}

// A rank that has left the job makes no more groups.
void left_before_group(int rank, int) {
  const auto all = join();
  if (rank == 1) return;
  const auto start = std::chrono::steady_clock::now();
  try {
    (void)parallel::new_group({0, 1, 2});
    require(false, "an error");
  } catch (const CommError& e) {
    require(e.rank() == 1 && std::string_view(e.what()).ends_with(" before it made the group"), e.what());
  }
  require(std::chrono::steady_clock::now() - start < std::chrono::seconds(10), "in time");
}

void stopped(int rank, int) {
  // A group with a timeout of its own: joining a loaded machine may take long.
  const auto all = join();
  const auto store =
      std::make_shared<parallel::TCPStore>(parallel::TCPStoreOptions{.host = std::getenv("MASTER_ADDR"),
                                                                     .port = std::atoi(std::getenv("MASTER_PORT")),
                                                                     .secret = parallel::secret_from_environment()});
  const auto group = parallel::make_shm_group(
      {.store = store, .name = "impatient", .ranks = {0, 1, 2}, .world_rank = rank, .timeout_seconds = 1});
  Tensor processes = empty({3}, {.dtype = int64});
  all->all_gather(processes, tensor(std::vector{static_cast<std::int64_t>(getpid())})).wait();
  Tensor large = ones({300'000});
  if (rank == 2) {
    kill(getpid(), SIGSTOP);
    require_error("given up on rank 2", [&] { group->all_reduce(large).wait(); });
    return;
  }
  require_error("rank 2", [&] { group->all_reduce(large).wait(); });
  require_error("rank 2", [&] { group->barrier().wait(); });
  if (rank == 0) kill(static_cast<pid_t>(processes[2].item<std::int64_t>()), SIGCONT);
}

// A child that a rank forks, and that ends in the ordinary way, is not the rank.
void forked(int rank, int) {
  (void)join();
  Tensor t = full({100'000}, rank + 1.0);
  const parallel::Work work = parallel::all_reduce(t, {.async_op = true});
  if (rank == 1) {
    const pid_t child = fork();
    if (child == 0) std::exit(0);
    int status = -1;
    require(waitpid(child, &status, 0) == child && status == 0, "the child ends well");
  }
  work.wait();
  require(test::same_bits(t, full({100'000}, 6.0)), "sum after the end of a child");
  parallel::barrier();
  parallel::destroy_process_group();
}

}  // namespace

int main() {
  for (const int n : {1, 2, 3, 4})
    if (const int code = parallel::spawn(collectives, {.nprocs = n}); code != 0) return code;
  if (const int code = parallel::spawn(memory, {.nprocs = 3}); code != 0) return code;
  if (const int code = parallel::spawn(many, {.nprocs = 3}); code != 0) return code;
  if (const int code = parallel::spawn(late_group, {.nprocs = 3}); code != 0) return code;
  if (const int code = parallel::spawn(forked, {.nprocs = 3}); code != 0) return code;
  const bool parent = std::getenv("RANK") == nullptr;  // in the others, earlier calls of spawn return at once
  const int killed_code = parallel::spawn(killed, {.nprocs = 3});
  require(!parent || (killed_code == 137 && proved(0) && proved(1)), "a killed rank is seen");
  for (const bool within : {false, true}) {
    const int code = parallel::spawn([&](int rank, int) { lose_peer(rank, within); }, {.nprocs = 3});
    require(!parent || (code == 137 && proved(0) && proved(1)), "a peer that is killed is seen");
  }
  const int left_code = parallel::spawn(left, {.nprocs = 3});
  require(!parent || (left_code == 0 && proved(0) && proved(1)), "a rank that left is seen");
  for (const char* backend : {"shm", "gloo"}) {
    const int code = parallel::spawn([&](int rank, int) { pending_at_the_end(rank, backend); }, {.nprocs = 2});
    require(!parent || (code == 1 && proved(1)), "a rank that ends with something pending is named");
    (void)proved(0);
  }
  if (const int code = parallel::spawn(left_before_group, {.nprocs = 3}); code != 0) return code;
  if (const int code = parallel::spawn(stopped, {.nprocs = 3}); code != 0) return code;
}
