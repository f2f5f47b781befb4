// ZeroRedundancyOptimizer over threads of this process: its cases on 1 to 4 ranks, the memory of each rank, and a state
// that goes from one number of ranks to another. zero_program.cpp runs the cases over processes.
#include <unistd.h>

#include <filesystem>

#include <tandem/tests/parallel/thread_ranks.h>
#include <tandem/tests/parallel/zero_cases.h>
#include <tandem/tests/support/test.h>

using namespace tandem;
using test::ZeroRedundancyOptimizer;

namespace {

template <class Body>
void run_ranks(int ranks, const Body& body) {
  test::on_ranks(ranks, [&](parallel::ProcessGroup&) { body(parallel::default_group()); });
}

// A file that is removed with it.
struct File {
  explicit File(const char* name)
      : path((std::filesystem::temp_directory_path() / fmt::format("tandem_{}_{}", getpid(), name)).string()) {}
  ~File() { std::filesystem::remove(path); }
  std::string path;
};

std::vector<Tensor> copies_of(const std::vector<Tensor>& all) {
  std::vector<Tensor> copies;
  for (const Tensor& t : all) copies.push_back(t.detach().clone());
  return copies;
}

}  // namespace

TEST_CASE("ZeroRedundancyOptimizer does what it must on 1 to 4 ranks") {
  for (const test::DdpCase& c : test::zero_cases())
    for (int ranks = 1; ranks <= 4; ++ranks) {
      INFO(std::string(c.name));
      CAPTURE(ranks);
      CHECK(test::error_of([&] { run_ranks(ranks, [&](const test::Group& group) { c.run(group); }); }) == "no error");
    }
}

// Each rank has a device of its own, whose memory is counted; that of cpu:0 is for what all do.
TEST_CASE("the memory of a rank's state is 1/n of all") {
  const int before = device_count(DeviceType::cpu);
  set_cpu_device_count(5);
  const std::int64_t all = 2 * 8 * (300 * 200 + 300 + 50 * 300 + 50), largest = 2 * 8 * 300 * 200;
  for (int ranks = 1; ranks <= 4; ++ranks) {
    CAPTURE(ranks);
    std::vector<std::int64_t> grown(static_cast<std::size_t>(ranks));
    run_ranks(ranks, [&](const test::Group& group) {
      const Device device(DeviceType::cpu, group->rank() + 1);
      auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(200, 300), nn::ReLU(), nn::Linear(300, 50));
      net->to(float64);
      test::fill(*net);
      net->to(device);
      auto zero = ZeroRedundancyOptimizer::make<optim::Adam>(net->parameters(), {}, group);
      for (Tensor& p : net->parameters()) p.set_grad(ones_like(p));
      zero.step();  // what it needs besides the state is in the pool from here on
      zero.load_state_dict(optim::Adam(net->parameters()).state_dict());
      const auto without = static_cast<std::int64_t>(memory_stats(device).in_use);
      zero.step();
      grown[static_cast<std::size_t>(group->rank())] = static_cast<std::int64_t>(memory_stats(device).in_use) - without;
    });
    for (const std::int64_t bytes : grown) CHECK(std::abs(bytes - all / ranks) <= largest);
    std::int64_t sum = 0;
    for (const std::int64_t bytes : grown) sum += bytes;
    CHECK(sum >= all);
    // Equal to within what the allocator rounds a block up by, of which there are two a parameter.
    for (const std::int64_t bytes : grown) CHECK(bytes <= all / ranks + all / 4);
  }
  set_cpu_device_count(before);
}

// Equal gradients on every rank, so that what 2 ranks go on with has the bits of a run that never stopped.
TEST_CASE("saved on 4 ranks, continued on 2, and by the optimizer alone: the same bits") {
  for (const DType dtype : {float32, float64}) {
    const File file("zero_equal");
    auto model = [&] { return test::make_mlp(dtype); };
    auto steps = [](const std::shared_ptr<nn::SequentialImpl>& net, auto& optimizer, int from, int to) {
      for (int step = from; step < to; ++step) {
        test::set_gradients(net->parameters(), step);
        optimizer.step();
      }
    };
    const auto whole = model();
    optim::Adam never_stopped(whole->parameters(), {.lr = 0.01, .amsgrad = true});
    steps(whole, never_stopped, 0, 20);
    run_ranks(4, [&](const test::Group& group) {
      const auto net = model();
      auto zero = ZeroRedundancyOptimizer::make<optim::Adam>(net->parameters(), {.lr = 0.01, .amsgrad = true}, group);
      steps(net, zero, 0, 10);
      parallel::save_checkpoint(file.path, {net, zero}, group);
      steps(net, zero, 10, 20);
      test::require_same_values(whole->parameters(), net->parameters(), "on 4 ranks");
    });
    for (int ranks = 1; ranks <= 4; ++ranks)
      run_ranks(ranks, [&](const test::Group& group) {
        const auto net = model();
        auto zero = ZeroRedundancyOptimizer::make<optim::Adam>(net->parameters(), {.lr = 1.0, .amsgrad = true}, group);
        load(file.path, {net, zero});
        steps(net, zero, 10, 20);
        test::require_same_values(whole->parameters(), net->parameters(), fmt::format("continued on {} ranks", ranks));
        test::require_same_state(never_stopped.state_dict(), zero.state_dict());
        if (ranks != 4) return;
        const auto again = model();
        auto of_job = ZeroRedundancyOptimizer::make<optim::Adam>(again->parameters(), {.amsgrad = true}, group);
        steps(again, of_job, 1, 2);  // what is not strict loads what there is already
        parallel::load_checkpoint(file.path, {again, of_job}, {.strict = false}, group);
        steps(again, of_job, 10, 20);
        test::require_same_values(whole->parameters(), again->parameters(), "loaded by load_checkpoint");
      });
    const auto net = model();
    optim::Adam alone(net->parameters(), {.amsgrad = true});
    load(file.path, {net, alone});
    steps(net, alone, 10, 20);
    test::require_same_values(whole->parameters(), net->parameters(), "continued by the optimizer alone");
    // And the reverse: what the optimizer alone has saved.
    save(file.path, {net, alone});
    run_ranks(3, [&](const test::Group& group) {
      const auto other = model();
      auto zero = ZeroRedundancyOptimizer::make<optim::Adam>(other->parameters(), {.amsgrad = true}, group);
      load(file.path, {other, zero});
      test::require_same_state(alone.state_dict(), zero.state_dict());
    });
  }
}

// The batch is divided among other ranks, so sums are rounded in another order.
TEST_CASE("a training by 4 ranks goes on with 2") {
  const File file("zero_trained");
  auto steps = [](const test::Group& group, parallel::DistributedDataParallel& ddp, ZeroRedundancyOptimizer& zero,
                  int from, int to) {
    for (int step = from; step < to; ++step) {
      ddp.loss(nn::CrossEntropyLoss(), test::part(test::wave({12, 6}, step), group),
               test::part(test::labels(12, 4, step), group))
          .backward();
      zero.step();
      zero.zero_grad();
    }
  };
  std::vector<Tensor> whole;
  run_ranks(4, [&](const test::Group& group) {
    const auto net = test::make_mlp();
    parallel::DistributedDataParallel ddp(net, {.process_group = group});
    auto zero = ZeroRedundancyOptimizer::make<optim::AdamW>(ddp.parameters(), {.lr = 0.01}, group);
    steps(group, ddp, zero, 0, 10);
    parallel::save_checkpoint(file.path, {net, zero}, group);
    steps(group, ddp, zero, 10, 25);
    if (group->rank() == 0) whole = copies_of(net->parameters());
  });
  run_ranks(2, [&](const test::Group& group) {
    const auto net = test::make_mlp(float64, 5);
    parallel::DistributedDataParallel ddp(net, {.process_group = group});
    auto zero = ZeroRedundancyOptimizer::make<optim::AdamW>(ddp.parameters(), {}, group);
    load(file.path, {net, zero});
    steps(group, ddp, zero, 10, 25);
    for (std::size_t i = 0; i < whole.size(); ++i)
      test::require_close(net->parameters()[i], whole[i], 1e-6, "a parameter");
  });
}

// The optimizer has a group of its own, of the same ranks: the state is on the rank that writes.
TEST_CASE("save_checkpoint in another group than the optimizer's") {
  const File file("zero_groups");
  run_ranks(3, [&](const test::Group& group) {
    const auto own = parallel::new_group({0, 1, 2});
    const auto net = test::make_mlp();
    auto zero = ZeroRedundancyOptimizer::make<optim::Adam>(net->parameters(), {}, own);
    test::set_gradients(net->parameters(), 1);
    zero.step();
    parallel::save_checkpoint(file.path, {net, {"second", zero}}, group);
    const auto other = test::make_mlp();
    optim::Adam alone(other->parameters());
    load(file.path, {other, {"second", alone}});
    test::require_same_state(alone.state_dict(), zero.state_dict());
  });
}
