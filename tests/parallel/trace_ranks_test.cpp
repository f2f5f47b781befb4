// The timeline of ranks that are threads, and what recording changes in training: nothing.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <tandem/data/loader.h>
#include <tandem/parallel/data_parallel.h>
#include <tandem/parallel/trace.h>
#include <tandem/tensor/trace.h>
#include <tandem/tests/parallel/ddp_cases.h>
#include <tandem/tests/parallel/thread_ranks.h>
#include <tandem/tests/support/test.h>

using namespace tandem;
using nlohmann::json;

namespace {

struct File {
  std::string path =
      (std::filesystem::temp_directory_path() / fmt::format("tandem-trace-test-{}.json", getpid())).string();
  File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { std::filesystem::remove(path); }
};

using Names = std::map<std::string, std::set<std::string>>;  // of the events on each track

// By process.
std::map<int, Names> read(const std::string& path) {
  json whole;
  std::ifstream(path) >> whole;
  std::map<int, Names> seen;
  std::map<std::pair<int, int>, std::string> tracks;
  for (const json& e : whole["traceEvents"]) {
    if (e["name"] == "thread_name") tracks[{e["pid"], e["tid"]}] = e["args"]["name"];
    if (e["ph"] != "M") seen[e["pid"]][tracks.at({e["pid"], e["tid"]})].insert(e["name"].get<std::string>());
  }
  return seen;
}

// Some steps of DDP on rows that a worker loads; returns the first weights then.
std::vector<double> train(const test::Group& group) {
  const auto net = test::make_mlp();
  parallel::DistributedDataParallel ddp(net, {.process_group = group, .first_bucket_mb = 1e-6});
  optim::SGD optimizer(ddp.parameters(), {.lr = 0.1});
  const nn::CrossEntropyLoss loss_fn;
  const data::TensorDataset set(test::wave({12, 6}, 1), test::labels(12, 4, 1));
  for (auto& [x, y] : data::DataLoader(set, {.batch_size = 4, .num_workers = 1})) {
    const trace::Span step("step");
    ddp.loss(loss_fn, test::part(x, group), test::part(y, group)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return net->parameters().front().to_vector<double>();
}

}  // namespace

TEST_CASE("ranks that are threads write one timeline") {
  const File file;
  std::vector<double> untraced;
  test::on_ranks(2, [&](parallel::ProcessGroup& group) {
    const std::vector<double> weights = train(parallel::default_group());
    if (group.rank() == 0) untraced = weights;
  });
  trace::start();
  test::on_ranks(2, [&](parallel::ProcessGroup&) {
    CHECK(train(parallel::default_group()) == untraced);
    parallel::write_trace(file.path);
  });
  trace::stop();
  const Names expected = {
      {"main", {"step", "load batch", "forward", "wait for normalizer", "backward", "exposed wait", "optimizer step"}},
      {"cpu:0", {"forward", "backward", "optimizer step", "rebuild buckets"}},
      {"loader 0", {"make batch"}},
      {"bucket 0", {"ready", "in flight"}},
      {"bucket 1", {"ready", "in flight"}},
  };
  const std::map<int, Names> seen = read(file.path);
  CHECK(fmt::format("{}", seen) == fmt::format("{}", std::map<int, Names>{{0, expected}, {1, expected}}));
}

TEST_CASE("PowerSGD's stages are on the rows of the buckets") {
  const File file;
  trace::start();
  test::on_ranks(2, [&](parallel::ProcessGroup&) {
    const auto net = test::make_mlp();
    parallel::DistributedDataParallel ddp(net);
    parallel::PowerSGD powersgd({.start_powersgd_iter = 0, .min_compression_rate = 1});
    ddp.register_comm_hook(powersgd.hook());
    mean(ddp(test::wave({4, 6}, 1))).backward();
    parallel::write_trace(file.path);
  });
  trace::stop();
  const std::set<std::string> expected = {"ready",   "in flight", "compress",  "send P",
                                          "project", "send Q",    "decompress"};
  for (const auto& [rank, tracks] : read(file.path))
    CHECK(fmt::format("{}", tracks.at("bucket 0")) == fmt::format("{}", expected));
}

TEST_CASE("DataParallel's phases are on the caller's track, each replica's on its device's") {
  const int before = device_count(DeviceType::cpu);
  set_cpu_device_count(2);
  const File file;
  trace::start();
  {
    const auto net = test::make_mlp();
    parallel::DataParallel model(net);
    optim::SGD optimizer(model.parameters(), {.lr = 0.1});
    const trace::Span step("step");
    model.loss(nn::CrossEntropyLoss(), test::wave({7, 6}, 1), test::labels(7, 4, 1)).backward();
    optimizer.step();
    (void)model(test::wave({7, 6}, 1));
  }
  trace::stop();
  parallel::write_trace(file.path);  // a program that is no rank
  set_cpu_device_count(before);
  const std::map<int, Names> seen = read(file.path);
  const Names expected = {
      {"main", {"step", "scatter", "replicate", "forward", "gather", "loss", "backward", "reduce", "optimizer step"}},
      {"cpu:0", {"forward", "backward", "reduce", "optimizer step"}},
      {"cpu:1", {"forward", "backward", "reduce", "optimizer step"}}};
  CHECK(fmt::format("{}", seen) == fmt::format("{}", std::map<int, Names>{{0, expected}}));
}

TEST_CASE("each rank tells what it has left out itself") {
  const File file;
  trace::start({.events_per_thread = 4});
  test::on_ranks(2, [&](parallel::ProcessGroup& group) {
    for (int i = 0; i < 6 + 3 * group.rank(); ++i) trace::instant("i");
    parallel::write_trace(file.path);
  });
  trace::stop();
  json whole;
  std::ifstream(file.path) >> whole;
  CHECK(whole["otherData"]["ranks"][0]["left_out"] == 2);
  CHECK(whole["otherData"]["ranks"][1]["left_out"] == 5);
  CHECK(test::contains(whole.dump(), "2 events left out"));
  CHECK(test::contains(whole.dump(), "5 events left out"));
}

TEST_CASE("a timeline that cannot be written is an error on every rank") {
  test::on_ranks(2, [&](parallel::ProcessGroup& group) {
    const std::string error = test::error_of([] { parallel::write_trace("/no/such/folder/trace.json"); });
    CHECK(test::contains(error, "/no/such/folder/trace.json cannot be written"));
    if (group.rank() == 1) CHECK(test::contains(error, "rank 1 of 2"));
    group.barrier().wait();  // the group goes on
  });
  test::on_ranks(2, [&](parallel::ProcessGroup& all) {
    const auto first = parallel::new_group({0});
    if (all.rank() == 1)
      CHECK_ERROR(parallel::write_trace("unused", first), "[write_trace]", "this process is not a member of the group");
  });
}
