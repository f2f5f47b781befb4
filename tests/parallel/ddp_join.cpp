// join: ranks with different numbers of batches train as one process would with the batches of all.
#include <tandem/tests/parallel/join_batches.h>

namespace tandem::test {
namespace {

using parallel::DistributedDataParallel;

// loss() is that of all live rows whatever the divisor; a mean of each rank's own is divided by the one or the other.
void one_batch_a_step(const Group& group) {
  for (const Counts& counts : all_counts(group))
    for (const bool rows : {true, false})
      for (const bool initial : {true, false})
        for (const bool zero_after : {true, false})
          compare_join(group, counts, {.rows = rows, .initial = initial, .zero_after = zero_after});
}

// What was averaged stays an average where more is added; what an ended rank has under no_sync counts.
void accumulated(const Group& group) {
  for (const Counts& counts : all_counts(group))
    for (const bool rows : {true, false})
      for (const bool initial : {true, false})
        for (const bool no_sync : {true, false})
          compare_join(group, counts, {.rows = rows, .initial = initial, .every = 2, .no_sync = no_sync});
}

// A gradient that was averaged, and then added to under no_sync.
void averaged_then_local(const Group& group) {
  const Counts all = {2, 3, 3, 3};
  const Counts counts(all.begin(), all.begin() + group->size());
  const auto net = std::make_shared<JoinNet>(false), alone = std::make_shared<JoinNet>(false);
  DistributedDataParallel ddp(net, {.process_group = group});
  ddp.join([&] {
    for (int k = 0; k < own(counts, group); ++k) {
      const auto [x, y] = batch_of(group->rank(), k);
      if (k == 1) {
        const auto guard = ddp.no_sync();
        ddp.loss(weighted_loss(), x, y).backward();
      } else {
        ddp.loss(weighted_loss(), x, y).backward();
      }
    }
  });
  if (group->size() == 1) return;
  const auto add = [&](int batch) {
    double total = 0;
    for (const int r : live_in(counts, batch)) total += normalizer_of(r, batch);
    for (const int r : live_in(counts, batch)) {
      const auto [x, y] = batch_of(r, batch);
      (weighted_loss().parts((*alone)(x), y).sum * (1 / total)).backward();
    }
  };
  for (int k = 0; k < 3; ++k) add(k);
  for (std::size_t i = 0; i < 4; ++i)
    if (group->rank() > 0)
      require_close(net->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-10, "a gradient");
}

void unused(const Group& group) {
  for (const Counts& counts : all_counts(group))
    for (const bool initial : {true, false})
      for (const int every : {1, 2})
        for (const bool zero_after : {true, false})
          compare_join(group, counts, {.initial = initial, .every = every, .unused = true, .zero_after = zero_after});
}

// With the same number of batches on all ranks nothing changes, to the bit.
void the_same_bits(const Group& group) {
  for (const bool rows : {true, false}) {
    std::vector<Tensor> first;
    for (const bool joined : {false, true}) {
      const auto net = std::make_shared<JoinNet>(false);
      DistributedDataParallel ddp(net, {.process_group = group});
      optim::Adam optimizer(net->parameters(), {.lr = 0.1});
      const auto loop = [&] {
        for (int k = 0; k < 4; ++k) {
          const auto [x, y] = batch_of(group->rank(), k);
          optimizer.zero_grad();
          (rows ? ddp.loss(weighted_loss(), x, y) : weighted_loss()(ddp(x), y)).backward();
          optimizer.step();
        }
      };
      joined ? (void)ddp.join(loop, {.divide_by_initial_world_size = false}) : loop();
      for (std::size_t i = 0; i < 4; ++i)
        if (joined)
          require(equal(net->parameters()[i].detach(), first[i]), "the bits of a weight");
        else
          first.push_back(net->parameters()[i].detach().clone());
    }
  }
}

// Counts, in a buffer, what its rank has seen.
struct Counting : nn::Module {
  explicit Counting(int r) : rank(r) { to(float64); }
  Tensor forward(const Tensor& x) override {
    if (is_training()) {
      const NoGradGuard no_grad;
      seen.add_(rank + 1.0);
    }
    return a(x);
  }
  int rank;
  nn::Linear a = register_module("a", nn::Linear(6, 4));
  nn::Buffer seen = register_buffer("seen", zeros({1}));
};

void join_buffers(const Group& group) {
  for (const Counts& counts : all_counts(group))
    for (const bool broadcast : {true, false}) {
      const auto net = std::make_shared<Counting>(group->rank());
      DistributedDataParallel ddp(net, {.process_group = group, .broadcast_buffers = broadcast});
      ddp.join([&] {
        for (int k = 0; k < own(counts, group); ++k) sum(ddp(batch_of(group->rank(), k).x)).backward();
      });
      double expected = broadcast ? 0 : own(counts, group) * (group->rank() + 1.0);
      for (int k = 1; broadcast && k <= most(counts); ++k)
        expected += live_in(counts, std::min(k, most(counts) - 1)).front() + 1.0;
      require(net->seen.item<double>() == expected, "the buffer follows the lowest rank that has batches");
    }
}

// Two models that train in one loop, in turns.
void join_two_models(const Group& group) {
  for (const Counts& counts : all_counts(group)) {
    std::vector<std::shared_ptr<JoinNet>> nets, alone;
    std::vector<std::unique_ptr<DistributedDataParallel>> ddps;
    for (int i = 0; i < 2; ++i) {
      nets.push_back(std::make_shared<JoinNet>(false));
      alone.push_back(std::make_shared<JoinNet>(false));
      fill(*nets.back(), i);
      fill(*alone.back(), i);
      ddps.push_back(std::make_unique<DistributedDataParallel>(
          nets.back(), parallel::DistributedDataParallelOptions{.process_group = group}));
    }
    const auto step = [](nn::Module& net) {
      const NoGradGuard no_grad;
      for (Tensor& p : net.parameters()) p.sub_(p.grad() * 0.1);
      net.zero_grad();
    };
    const int root = parallel::join(
        [&] {
          for (int k = 0; k < own(counts, group); ++k)
            for (std::size_t i = 0; i < 2; ++i) {
              if (k % 2 == 0 && i == 1) continue;  // not in every batch
              const auto [x, y] = batch_of(group->rank(), k);
              ddps[i]->loss(weighted_loss(), x, y).backward();
              step(*nets[i]);
            }
        },
        {}, group);
    require(root == last_rank(counts), "the rank that went on longest");
    for (std::size_t i = 0; i < 2; ++i) {
      for (int k = 0; k < most(counts); ++k) {
        if (k % 2 == 0 && i == 1) continue;
        double rows = 0;
        for (const int r : live_in(counts, k)) rows += normalizer_of(r, k);
        for (const int r : live_in(counts, k)) {
          const auto [x, y] = batch_of(r, k);
          (weighted_loss().parts((*alone[i])(x), y).sum * (1 / rows)).backward();
        }
        step(*alone[i]);
      }
      for (std::size_t p = 0; p < 4; ++p)
        require_close(nets[i]->parameters()[p], alone[i]->parameters()[p], 1e-10, "a weight of two models");
      parallel::check_consistency(*nets[i], group);
    }
  }
}

}  // namespace

std::vector<DdpCase> join_cases() {
  return {{"join: one batch a step", one_batch_a_step},
          {"join: accumulated", accumulated},
          {"join: averaged, then local", averaged_then_local},
          {"join: unused parameters", unused},
          {"join: the same bits", the_same_bits},
          {"join: buffers", join_buffers},
          {"join: two models", join_two_models}};
}

}  // namespace tandem::test
