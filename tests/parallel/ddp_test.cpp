// DistributedDataParallel over threads of this process; distributed_program runs the same over processes.
#include <tandem/tests/parallel/ddp_cases.h>
#include <tandem/tests/support/test.h>

using namespace tandem;

namespace {

// Runs `body(group)` on ranks that are threads.
template <class Body>
void run_ranks(int ranks, const Body& body) {
  parallel::spawn_threads(
      [&](int, int) {
        parallel::init_process_group({.backend = "thread"});
        body(parallel::default_group());
        parallel::destroy_process_group();
      },
      {.nthreads = ranks});
}

}  // namespace

// Each rank's model is on a device of its own, while the group's memory is the CPU's.
TEST_CASE("ranks work on CPU devices of their own") {
  const int before = device_count(DeviceType::cpu);
  set_cpu_device_count(2);
  run_ranks(2, [](const test::Group& group) {
    const auto net = test::make_mlp(), alone = test::make_mlp();
    const Device device(DeviceType::cpu, group->rank());
    net->to(device);
    parallel::DistributedDataParallel ddp(net, {.device_ids = {device}, .process_group = group});
    optim::SGD optimizer(ddp.parameters(), {.lr = 0.1});
    const Tensor x = test::wave({7, 6}, 1), y = test::labels(7, 4, 1);
    const nn::CrossEntropyLoss loss_fn;
    for (int step = 0; step < 3; ++step) {
      alone->zero_grad();
      loss_fn((*alone)(x), y).backward();
      ddp.loss(loss_fn, test::part(x, group).to(device), test::part(y, group).to(device)).backward();
      for (std::size_t i = 0; i < 4; ++i) {
        test::require(net->parameters()[i].grad().device() == device, "a gradient is where its parameter is");
        test::require_close(net->parameters()[i].grad().to(Device()), alone->parameters()[i].grad(), 1e-12,
                            "a gradient");
      }
      optimizer.zero_grad();
    }
  });
  set_cpu_device_count(before);
}

// A model on two devices: its hooks run on a thread for each.
TEST_CASE("a rank's model may span devices") {
  const int before = device_count(DeviceType::cpu);
  set_cpu_device_count(2);
  struct Halves : nn::Module {
    Halves() {
      to(float64);
      test::fill(*this);
      b->to(Device("cpu:1"));
    }
    Tensor forward(const Tensor& x) override { return b(relu(a(x)).to(Device("cpu:1"))).to(Device("cpu:0")) + c(x); }
    nn::Linear a = register_module("a", nn::Linear(6, 5)), b = register_module("b", nn::Linear(5, 4)),
               c = register_module("c", nn::Linear(6, 4));
  };
  run_ranks(2, [](const test::Group& group) {
    const auto net = std::make_shared<Halves>(), alone = std::make_shared<Halves>();
    parallel::DistributedDataParallel ddp(net, {.process_group = group, .first_bucket_mb = 1e-5});
    const Tensor x = test::wave({7, 6}, 1), y = test::labels(7, 4, 1);
    const nn::CrossEntropyLoss loss_fn;
    for (int step = 0; step < 4; ++step) {
      loss_fn((*alone)(x), y).backward();
      ddp.loss(loss_fn, test::part(x, group), test::part(y, group)).backward();
      for (std::size_t i = 0; i < 6; ++i)
        test::require_close(net->parameters()[i].grad().to(Device()), alone->parameters()[i].grad().to(Device()), 1e-12,
                            "a gradient");
      net->zero_grad();
      alone->zero_grad();
    }
  });
  set_cpu_device_count(before);
}

// A state on two devices is taken over, whatever devices a rank's tensors are on.
TEST_CASE("broadcast_state of a state on two devices") {
  const int before = device_count(DeviceType::cpu);
  set_cpu_device_count(2);
  struct Two : nn::Module {
    explicit Two(Device second) {
      to(float64);
      b->to(second);
    }
    Tensor forward(const Tensor& x) override { return b(a(x).to(b->weight.device())).to(Device("cpu:0")); }
    nn::Linear a = register_module("a", nn::Linear(6, 4)), b = register_module("b", nn::Linear(4, 2));
  };
  for (const bool alike : {true, false})
    run_ranks(3, [&](const test::Group& group) {
      const auto net = std::make_shared<Two>(Device(alike || group->rank() != 1 ? "cpu:1" : "cpu:0"));
      test::fill(*net, group->rank());
      parallel::broadcast_state(*net, group);
      parallel::check_consistency(*net, group);
      optim::Adam optimizer(net->parameters(), {.lr = 0.1 * (group->rank() + 1)});
      sum((*net)(test::wave({3, 6}, group->rank()))).backward();
      optimizer.step();
      parallel::broadcast_state(*net, group);
      parallel::broadcast_state(optimizer, group);
      parallel::check_consistency(*net, optimizer, group);
      if (!alike) return;
      parallel::DistributedDataParallel ddp(net, {.process_group = group});
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        sum(ddp(test::wave({3, 6}, group->rank()))).backward();
        optimizer.step();
      }
      parallel::broadcast_state(optimizer, group);
      parallel::check_consistency(ddp, optimizer, group);
    });
  set_cpu_device_count(before);
}

TEST_CASE("DistributedDataParallel does what it must on 1 to 4 ranks") {
  for (const auto& cases :
       {test::equality_cases(), test::gradient_cases(), test::loss_cases(), test::unused_cases(),
        test::mechanism_cases(), test::failure_cases(), test::consistency_cases(), test::checkpoint_cases(),
        test::guard_cases(), test::hook_cases(), test::hook_fault_cases(), test::powersgd_cases(), test::join_cases(),
        test::join_pair_cases(), test::join_failure_cases()})
    for (const test::DdpCase& c : cases)
      for (int ranks = 1; ranks <= 4; ++ranks) {
        INFO(std::string(c.name));
        CAPTURE(ranks);
        CHECK(test::error_of([&] { run_ranks(ranks, [&](const test::Group& group) { c.run(group); }); }) == "no error");
      }
}
