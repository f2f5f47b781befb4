// One rank of a job over MPI, for mpi_test.py, which starts it by mpirun.
// usage: mpi_program collectives | own | own single | messages FOLDER | abandoned FOLDER | truncated FOLDER |
// late FOLDER | HOW, which is how rank 2 of 3 ends
#include <dlfcn.h>
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <thread>

#include <tandem/parallel/comm/file_store.h>
#include <tandem/parallel/comm/mpi_module.h>
#include <tandem/tandem.h>
#include <tandem/tests/parallel/collective_cases.h>

using namespace tandem;
using parallel::ReduceOp;
using parallel::Transfer;
using test::require;
using test::require_error;

namespace {

void collectives() {
  parallel::init_process_group({.backend = "mpi"});
  const auto group = parallel::default_group();
  const int rank = group->rank(), ranks = group->size();
  require(group->backend() == "mpi", "backend");
  // The bits of every type and size are those of `combine`, which comm_test looks at.
  if (ranks == 3)
    for (int d = 0; d < kDTypeCount; ++d) test::collective_cases_of(*group, static_cast<DType>(d), 1100);
  else
    for (const std::int64_t count : {0, 1, 5, 1100, 9'001}) test::collective_cases_of(*group, float32, count);
  test::order_cases(*group);
  test::message_cases(*group, 50'001);
  test::argument_cases(*group);
  const std::int64_t count = 1'100'003;  // several pieces, which do not divide
  const Tensor numbers = arange(count).to(float64);
  Tensor t = numbers * (rank + 1.0);
  parallel::all_reduce(t, {.op = ReduceOp::avg});
  require(equal(t, numbers * ((ranks + 1) / 2.0)), "average in pieces");
  t = full({3 << 20}, rank + 1.0);
  parallel::broadcast(t, ranks - 1);
  require(test::same_bits(t, full({3 << 20}, 1.0 * ranks)), "broadcast in pieces");
  // Groups of some ranks, several at once, and works of both under way.
  std::vector<int> ends{0};
  if (ranks > 1) ends.push_back(ranks - 1);
  const auto pair = parallel::new_group(ends);
  Tensor in_pair = full({1}, rank + 1.0), in_all = full({1}, rank + 1.0);
  const parallel::Work all = parallel::all_reduce(in_all, {.async_op = true});
  if (pair->rank() >= 0) {
    parallel::all_reduce(in_pair, {.group = pair});
    require(in_pair.item<double>() == (ranks > 1 ? 1.0 + ranks : 1.0), "sum in a group");
  } else {
    require_error("not a member", [&] { parallel::barrier({.group = pair}); });
  }
  all.wait();
  require(in_all.item<double>() == ranks * (ranks + 1) / 2.0, "sum beside it");
  parallel::destroy_process_group();
  // MPI stays for the next joining.
  parallel::init_process_group({.backend = "mpi"});
  t = ones({2});
  parallel::all_reduce(t);
  require(test::same_bits(t, full({2}, 1.0 * ranks)), "sum after joining again");
  print("rank {} of {}: passed\n", rank, ranks);
  // The end of the program leaves the job.
}

// The program uses MPI itself, too.
void own(bool single) {
  int level = -1, rank = -1, sum = 0;
  MPI_Init_thread(nullptr, nullptr, single ? MPI_THREAD_SINGLE : MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (single) {
    require_error("is needed; initialise MPI with MPI_Init_thread",
                  [] { parallel::init_process_group({.backend = "mpi"}); });
  } else {
    parallel::init_process_group({.backend = "mpi"});
    Tensor t = ones({2});
    const parallel::Work work = parallel::all_reduce(t, {.async_op = true});
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    work.wait();
    require(sum == 1 && test::same_bits(t, full({2}, 2.0)), "sums of both");
    parallel::destroy_process_group();
  }
  MPI_Finalize();
  print("rank {} of 2: passed\n", rank);
}

// A mesh between two ranks without a group over it.
struct Pair {
  explicit Pair(const std::string& folder) {
    rank = std::atoi(std::getenv("OMPI_COMM_WORLD_RANK"));
    store = std::make_shared<parallel::FileStore>(
        parallel::FileStoreOptions{.path = folder + "/store", .rank = rank, .world_size = 2});
    void* const module = dlopen(std::getenv(parallel::kMpiModuleVariable), RTLD_NOW | RTLD_LOCAL);
    require(module != nullptr, "the module opens");
    make = reinterpret_cast<parallel::MpiEntry*>(dlsym(module, parallel::kMpiEntry));
  }
  std::unique_ptr<parallel::Mesh> mesh(const std::string& name = "pair", double seconds = 30) const {
    return std::unique_ptr<parallel::Mesh>(make({.store = store,
                                                 .name = name,
                                                 .ranks = {0, 1},
                                                 .hosts = {0, 0},
                                                 .world_rank = rank,
                                                 .timeout_seconds = seconds},
                                                rank));
  }
  std::shared_ptr<parallel::Store> store;
  parallel::MpiEntry* make = nullptr;
  int rank = 0;
};

// Messages larger than MPI takes at once, and two threads that exchange at a time.
void messages(const std::string& folder) {
  const Pair pair(folder);
  const auto first = pair.mesh("first");
  if (pair.rank == 0) pair.store->set("mpi/tags", std::to_string(INT_MAX - 10));
  require_error("too many groups have been made: this MPI has 2147483647 tags, and a group of 2 ranks needs 20",
                [&] { (void)pair.mesh("second"); });
  if (pair.rank == 0) pair.store->set("mpi/tags", "25");
  const auto mesh = pair.mesh("third");
  const int other = 1 - pair.rank;
  require_error("lane 20 is out of range: there are 20", [&] { mesh->exchange(20, {}, {}, 1); });
  constexpr std::size_t kLarge = (150 << 20) + 3;
  std::vector<char> out(kLarge), in(kLarge);
  for (std::size_t i = 0; i < kLarge; ++i) out[i] = static_cast<char>(i % 251 + static_cast<std::size_t>(pair.rank));
  std::thread beside([&] {
    for (int i = 0; i < 300; ++i) {
      int mine = 10 * i + pair.rank, theirs = -1;
      mesh->exchange(7, {{other, &mine, sizeof mine}}, {{other, &theirs, sizeof theirs}}, 60);
      require(theirs == 10 * i + other, "messages of a lane in order");
    }
  });
  mesh->exchange(0, {{other, out.data(), kLarge}}, {{other, in.data(), kLarge}}, 60);
  beside.join();
  for (std::size_t i = 0; i < kLarge; ++i)
    require(in[i] == static_cast<char>(i % 251 + static_cast<std::size_t>(other)), "a large message");
  // Messages that wait for their receive are taken in the order of the sends.
  std::vector<int> sent{1, 2, 3}, got(3);
  std::vector<Transfer> sends, receives;
  for (std::size_t i = 0; i < 3; ++i) sends.push_back({other, &sent[i], sizeof(int)});
  for (std::size_t i = 0; i < 3; ++i) receives.push_back({other, &got[i], sizeof(int)});
  mesh->exchange(1, sends, receives, 60);
  require(got == sent, "several messages to one rank");
  print("rank {} of 2: passed\n", pair.rank);
}

// An exchange is abandoned by another thread, and no other one starts.
void abandoned(const std::string& folder) {
  const Pair pair(folder);
  const auto mesh = pair.mesh();
  int value = 0;
  const auto fails = [&](std::string_view text, bool late, double seconds) {
    try {
      mesh->exchange(0, {}, {{1, &value, sizeof value}}, seconds);
    } catch (const parallel::ExchangeError& e) {
      require(e.peers == std::vector{1} && e.late == late, "whom it is about");
      require(e.text.find(text) != std::string::npos, fmt::format("'{}' is missing in: {}", text, e.text));
      return;
    }
    require(false, "an exchange fails");
  };
  if (pair.rank == 0) {
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      mesh->abandon();
    });
    fails("the group was destroyed", false, 60);
    other.join();
    fails("has given up another exchange over MPI", false, 60);
    print("rank 0 of 2: passed\n");
  }
  pair.store->add("through", 1);
  while (pair.store->get("through") != "2") std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

// Ranks that disagree about a length.
void truncated(const std::string& folder) {
  const Pair pair(folder);
  const auto mesh = pair.mesh();
  std::vector<char> bytes(100);
  if (pair.rank == 0) {
    mesh->exchange(0, {{1, bytes.data(), 100}}, {}, 60);
  } else {
    std::string text;
    try {
      mesh->exchange(0, {}, {{0, bytes.data(), 50}}, 60);
    } catch (const parallel::ExchangeError& e) {
      text = e.text;
      require(e.peers == std::vector{0} && !e.late, "whom it is about");
    }
    require(text.find("MPI_ERR_TRUNCATE") != std::string::npos, "MPI's words: " + text);
    print("rank 1 of 2: passed\n");
  }
}

// A rank does not come to MPI_Init_thread.
void late(const std::string& folder) {
  const Pair pair(folder);
  if (pair.rank == 0) {
    require_error("rank 0 of 2: waited 1 s in MPI_Init_thread for rank 1; a longer wait",
                  [&] { (void)pair.mesh("pair", 1); });
    print("rank 0 of 2: passed\n");
    pair.store->set("through", "");
  }
  pair.store->get("through");
}

// Rank 2 of 3 ends in some way while the others wait for it.
void lost(const std::string& how) {
  parallel::init_process_group({.backend = "mpi", .timeout_seconds = 60});
  if (how == "stopped") {  // a short time, when all are there already: it is not for the start of the processes
    parallel::barrier();
    parallel::destroy_process_group();
    parallel::init_process_group({.backend = "mpi", .timeout_seconds = 2});
  }
  Tensor t = ones({200'000});
  for (int i = 0; i < 5; ++i) parallel::all_reduce(t);
  const auto kept = parallel::default_group();
  if (parallel::rank() == 2) {
    fmt::print(stderr, "rank 2 goes\n");
    if (how == "killed") raise(SIGKILL);
    if (how == "code 3") std::exit(3);
    if (how == "code 0") std::exit(0);
    if (how == "aborts") std::abort();
    if (how == "throws") fail("test", "this rank has had enough");
    if (how == "stopped") raise(SIGSTOP);
    if (how == "ends at once") std::_Exit(0);
    require(how == "returns", "a known way to end");
    return;
  }
  for (;;) parallel::all_reduce(t);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "", folder = argc > 2 ? argv[2] : "";
  alarm(100);  // a rank that hangs is a fault
  try {
    if (what == "collectives")
      collectives();
    else if (what == "own")
      own(folder == "single");
    else if (what == "truncated")
      truncated(folder);
    else if (what == "messages")
      messages(folder);
    else if (what == "abandoned")
      abandoned(folder);
    else if (what == "late")
      late(folder);
    else
      lost(what);
    return 0;
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
