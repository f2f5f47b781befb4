// join together with what else is there: optimizers whose state is divided, communication hooks, first steps, guards.
#include <tandem/tests/parallel/join_batches.h>

namespace tandem::test {
namespace {

using parallel::DistributedDataParallel;

// Each rank has a share of the parameters, and steps it also when its batches are over: with the gradients as the
// others have clipped them, and with the learning rates that the others have set.
void divided_optimizer(const Group& group) {
  const auto options = optim::SGDOptions{.lr = 0.1, .momentum = 0.9};
  for (const Counts& counts : all_counts(group))
    for (const double clip : {0.0, 0.3})
      for (const int every : {1, 2})
        for (const bool unused : {true, false})
          compare_join(
              group, counts, {.every = every, .unused = unused, .zero_after = clip == 0, .clip = clip},
              [&](std::vector<Tensor> parameters) {
                return std::make_unique<parallel::ZeroRedundancyOptimizer>(
                    std::move(parameters),
                    [&](std::vector<Tensor> slices) {
                      return std::make_unique<optim::SGD>(std::move(slices), options);
                    },
                    group);
              },
              [&](std::vector<Tensor> parameters) {
                return std::make_unique<optim::SGD>(std::move(parameters), options);
              },
              [](parallel::ZeroRedundancyOptimizer& zero, int) { (void)zero.state_dict(); });
}

// The hooks of ended ranks run, too: those that lose nothing give what one process gives.
void join_hooks(const Group& group) {
  for (const Counts& counts : all_counts(group))
    for (const bool rows : {true, false}) {
      int calls = 0;
      JoinMode mode{.rows = rows, .initial = rows, .zero_after = true};
      mode.hook = [&] {
        return parallel::CommHook{"own", [&](parallel::GradBucket& bucket) {
                                    ++calls;
                                    return group->all_reduce(bucket.buffer(), parallel::ReduceOp::avg);
                                  }};
      };
      compare_join(group, counts, mode);
      require(calls == (in_full(group) ? 2 : 1) * 4 * most(counts),
              "a call for each bucket of each backward, on every rank");
      mode.hook = [&] { return parallel::bf16_compress_hook(group); };
      mode.tolerance = 0.1;
      compare_join(group, counts, mode);
      // Of full rank nothing is left out.
      mode.tolerance = 1e-8;
      mode.hook = [&] {
        parallel::PowerSGD powersgd(
            {.matrix_approximation_rank = 8, .start_powersgd_iter = 1, .min_compression_rate = 1e-3}, group);
        return powersgd.hook();
      };
      compare_join(group, counts, mode);
      mode.tolerance = 10;  // one direction a step: what counts is that all ranks have the same
      mode.hook = [&] {
        parallel::PowerSGD powersgd({.start_powersgd_iter = 0, .min_compression_rate = 1}, group);
        return powersgd.hook();
      };
      compare_join(group, counts, mode);
    }
}

// The first step is compared between those that have batches; a rank that has had none has its own first step later.
void first_steps(const Group& group) {
  if (group->size() < 3) return;
  for (const bool alike : {true, false}) {
    const auto net = std::make_shared<JoinNet>(false);
    DistributedDataParallel ddp(net, {.process_group = group});
    const bool odd = group->rank() == group->size() - 1;
    optim::SGD optimizer(net->parameters(), {.lr = alike || !odd ? 0.1 : 0.2, .momentum = 0.5});
    const auto loop = [&](bool first_too) {
      if (group->rank() == 0 && !first_too) return;
      optimizer.zero_grad();
      const auto [x, y] = batch_of(group->rank(), 0);
      ddp.loss(weighted_loss(), x, y).backward();
      optimizer.step();
    };
    const std::string last = fmt::format("rank {}", group->size() - 1);
    if (!alike) {
      require_error({group->size() > 3 ? "the ranks differ: the values of optimizer state 'group.0.lr'"
                                       : "the ranks differ: the values of optimizer state 'group.0.lr'"},
                    [&] { ddp.join([&] { loop(false); }); });
      continue;
    }
    const int root = ddp.join([&] { loop(false); });
    parallel::broadcast_state(optimizer, group, root);
    ddp.join([&] { loop(true); });
    loop(true);
    parallel::check_consistency(*net, optimizer, group);
  }
}

// The guard sees those that have batches.
void divergence(const Group& group) {
  const auto net = std::make_shared<JoinNet>(false);
  DistributedDataParallel ddp(net, {.process_group = group, .check_every = 1});
  const Counts counts = Counts({0, 4, 4, 4});
  const auto loop = [&](bool planted) {
    for (int k = 0; k < own(counts, group); ++k) {
      {
        const NoGradGuard no_grad;
        net->a->weight.add_(planted && group->rank() == group->size() - 1 ? 1.0 : 0.5);
      }
      const auto [x, y] = batch_of(group->rank(), k);
      ddp.loss(weighted_loss(), x, y).backward();
      net->zero_grad();
    }
  };
  ddp.join([&] { loop(false); });
  parallel::check_consistency(*net, group);
  if (group->size() < 3) return;
  require_error({"the ranks differ at step ", "element (0, 0) of parameter 'a.weight'"},
                [&] { ddp.join([&] { loop(true); }); });
}

}  // namespace

std::vector<DdpCase> join_pair_cases() {
  return {{"join: a divided optimizer", divided_optimizer},
          {"join: hooks", join_hooks},
          {"join: first steps", first_steps},
          {"join: divergence", divergence}};
}

}  // namespace tandem::test
