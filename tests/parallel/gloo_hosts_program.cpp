// Processes over Gloo that are told to be on several hosts, though they are on one: sums go through shared memory
// inside each and through Gloo between leaders; ranks that end or stop in either. Ends with 1 on a fault.
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include <tandem/parallel/comm/mesh.h>
#include <tandem/parallel/comm/rendezvous.h>
#include <tandem/tandem.h>
#include <tandem/tests/parallel/collective_cases.h>
#include <tandem/tests/parallel/mesh_cases.h>
#include <tandem/tests/parallel/proofs.h>

using namespace tandem;
using parallel::ReduceOp;
using test::prove;
using test::require;
using test::require_error;
using test::run;
using test::wait_for_proofs;

namespace {

// Gloo, counting the bytes of data that members send which do not lead a host.
class CountingMesh final : public parallel::Mesh {
 public:
  CountingMesh(const parallel::GroupSetup& setup, int rank)
      : mesh_(parallel::make_gloo_mesh(setup, rank)), leads_(setup.hosts[static_cast<std::size_t>(rank)] == rank) {}
  void exchange(int lane, const std::vector<parallel::Transfer>& sends, const std::vector<parallel::Transfer>& receives,
                double seconds) override {
    for (const parallel::Transfer& t : sends)
      if (!leads_ && t.bytes > 4096) sent_by_others += t.bytes;
    mesh_->exchange(lane, sends, receives, seconds);
  }
  void abandon() override { mesh_->abandon(); }
  void close() override { mesh_->close(); }
  static inline std::size_t sent_by_others = 0;

 private:
  const std::unique_ptr<Mesh> mesh_;
  const bool leads_;
};

const parallel::Place& place_in_job() {
  static const parallel::Place place = parallel::find_place({.timeout_seconds = 60});
  return place;
}

std::shared_ptr<parallel::ProcessGroup> join_hosts(const std::vector<int>& hosts, double timeout_seconds = 60) {
  alarm(100);
  const parallel::Place& place = place_in_job();
  static int groups = 0;
  parallel::GroupSetup setup{.store = place.store,
                             .name = fmt::format("hosts{}", groups++),
                             .hosts = hosts,
                             .world_rank = place.rank,
                             .store_host = place.store_host,
                             .timeout_seconds = timeout_seconds};
  for (int r = 0; r < place.world_size; ++r) setup.ranks.push_back(r);
  return parallel::make_mesh_group(setup, "gloo", [](const parallel::GroupSetup& s, int rank) {
    return std::unique_ptr<parallel::Mesh>(std::make_unique<CountingMesh>(s, rank));
  });
}

void on_hosts(int, int ranks) {
  for (const test::HostLayout& layout : test::host_layouts()) {
    if (static_cast<int>(layout.hosts.size()) != ranks) continue;
    const auto group = join_hosts(layout.hosts);
    Tensor t = ones({100'000});
    CountingMesh::sent_by_others = 0;
    group->all_reduce(t).wait();
    const int me = group->rank();
    const bool leads = layout.hosts[static_cast<std::size_t>(me)] == me;
    require((CountingMesh::sent_by_others > 0) == (!layout.in_tree && !leads), "leaders alone send data");
    require(place_in_job().store->num_keys("hosts") == 0, "no key is left of making the groups");
    test::host_cases(*group);
    // DDP's way: works under way beside each other.
    std::vector<Tensor> tensors;
    std::vector<parallel::Work> works;
    for (int i = 0; i < 10; ++i) {
      tensors.push_back(full({50'000}, me + 1.0 + i));
      works.push_back(group->all_reduce(tensors.back()));
    }
    for (std::size_t i = 0; i < 10; ++i) {
      works[i].wait();
      require(test::same_bits(tensors[i], full({50'000}, ranks * (ranks + 1) / 2.0 + ranks * double(i))), "sums");
    }
  }
}

// A host that has no memory to share: all go the other way.
void without_memory(int rank, int) {
  const auto group = join_hosts({0, 0, 2, 2});
  group->barrier().wait();
  rlimit files{};
  if (rank == 2) {
    getrlimit(RLIMIT_NOFILE, &files);
    const rlimit none{0, files.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
  }
  Tensor t = full({100'000}, rank + 1.0);
  for (int i = 0; i < 2; ++i) {
    t.fill_(rank + 1.0);
    group->all_reduce(t).wait();
    require(test::same_bits(t, full({100'000}, 10.0)), "sum without shared memory");
  }
  require((CountingMesh::sent_by_others > 0) == (rank % 2 == 1), "all send data");
  if (rank == 2) setrlimit(RLIMIT_NOFILE, &files);
}

std::vector<int> others_than(int rank) {
  std::vector<int> result;
  for (int r = 0; r < 4; ++r)
    if (r != rank) result.push_back(r);
  return result;
}
// Where a rank that ends says when.
std::string time_file(pid_t launcher) { return test::proof(launcher, 9); }
double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// A member of a host ends while its host's memory is used, or while its leader waits for another host.
void lost_on_host(int rank, int lost) {
  const auto group = join_hosts({0, 0, 2, 2});
  const std::string time_of_end = time_file(getppid());
  Tensor t = ones({3'000'000});
  group->all_reduce(t).wait();
  if (rank == lost)
    std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      std::ofstream(time_of_end) << fmt::format("{}", now()) << std::flush;
      raise(SIGKILL);
    }).detach();
  const auto require_about = [&](const auto& body) {
    require_error(fmt::format("rank {} of 4: rank {} was killed by signal 9 (Killed) while this rank waited in "
                              "all_reduce (max, call",
                              rank, lost),
                  [&] {
                    try {
                      body();
                    } catch (const parallel::CommError& e) {
                      require(e.rank() == lost, fmt::format("'{}' is about rank {}", e.what(), lost));
                      throw;
                    }
                  });
  };
  require_about([&] {
    for (;;) group->all_reduce(t, ReduceOp::max).wait();
  });
  double then = 0;
  std::ifstream(time_of_end) >> then;
  require(now() - then < 4, fmt::format("the end of a rank is known after {} s", now() - then));
  require_about([&] { group->barrier().wait(); });
  prove(rank);
}

// A rank stops in the middle of a collective, in the memory of its host or between hosts, until the others have seen
// it.
void stopped_on_host(int rank, int stopped) {
  join_hosts({0, 0, 2, 2})->barrier().wait();
  const auto group = join_hosts({0, 0, 2, 2}, 1);  // when all are there already
  const pid_t self = getpid(), launcher = getppid();
  Tensor t = ones({3'000'000});
  group->all_reduce(t).wait();
  if (rank == stopped && fork() == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    kill(self, SIGSTOP);
    wait_for_proofs(launcher, others_than(stopped));
    kill(self, SIGCONT);
    _exit(0);
  }
  require_error(fmt::format("rank {}", stopped), [&] {
    try {
      for (;;) group->all_reduce(t, ReduceOp::max).wait();
    } catch (const parallel::CommError& e) {
      require(e.rank() == stopped, fmt::format("'{}' is about rank {}", e.what(), stopped));
      throw;
    }
  });
  prove(rank);
}

}  // namespace

int main() {
  int faults = 0;
  for (const int ranks : {4, 5}) faults += run("on hosts", 0, {}, on_hosts, ranks);
  faults += run("without memory", 0, {}, without_memory, 4);
  for (const int lost : {0, 3}) {
    faults += run(
        "lost on a host", 137, others_than(lost), [&](int r, int) { lost_on_host(r, lost); }, 4);
    std::filesystem::remove(time_file(getpid()));
  }
  for (const int stopped : {1, 2})
    faults += run(
        "stopped on a host", 0, {0, 1, 2, 3}, [&](int r, int) { stopped_on_host(r, stopped); }, 4);
  return faults == 0 ? 0 : 1;
}
