// Ranks with different numbers of batches, and what one process computes from the same.
#pragma once
#include <functional>

#include <tandem/tests/parallel/ddp_cases.h>

namespace tandem::test {

using Counts = std::vector<int>;  // batches of each rank

/// Between processes a call takes longer, and a few tell whether the backend serves.
inline bool in_full(const Group& group) { return group->backend() == "thread"; }
/// Those of a group's ranks.
inline std::vector<Counts> all_counts(const Group& group) {
  std::vector<Counts> all = {{1, 0, 2, 2}, {3, 3, 3, 3}, {5, 2, 3, 1}, {0, 4, 4, 2}, {1, 0, 3, 3}, {0, 0, 0, 0}};
  if (!in_full(group)) all.resize(1);
  for (Counts& counts : all) counts.resize(static_cast<std::size_t>(group->size()));
  return all;
}
inline int most(const Counts& counts) { return *std::ranges::max_element(counts); }
inline int own(const Counts& counts, const Group& group) { return counts[static_cast<std::size_t>(group->rank())]; }
/// The ranks that have a batch of this number.
inline std::vector<int> live_in(const Counts& counts, int batch) {
  std::vector<int> live;
  for (int r = 0; r < static_cast<int>(counts.size()); ++r)
    if (batch < counts[static_cast<std::size_t>(r)]) live.push_back(r);
  return live;
}
/// The lowest of the ranks that go on longest.
inline int last_rank(const Counts& counts) { return most(counts) == 0 ? 0 : live_in(counts, most(counts) - 1).front(); }

/// One to three rows.
struct Batch {
  Tensor x, y;
};
inline Batch batch_of(int rank, int batch) {
  const std::int64_t rows = 1 + (rank + 2 * batch) % 3;
  return {wave({rows, 6}, rank + 0.1 * batch), labels(rows, 4, rank + batch)};
}
inline const nn::CrossEntropyLoss& weighted_loss() {
  static const nn::CrossEntropyLoss loss({.weight = tensor({1.0, 0.5, 2.0, 4.0}, {.dtype = float64})});
  return loss;
}
inline double normalizer_of(int rank, int batch) {
  return weighted_loss().normalizer(batch_of(rank, batch).y).item<double>();
}

/// Two layers, of which the second may be left out in some batches.
struct JoinNet : nn::Module {
  explicit JoinNet(bool leaves_out) : sometimes(leaves_out) {
    to(float64);
    fill(*this);
  }
  void see(int rank, int batch) { both = !sometimes || (rank + batch) % 3 == 0; }
  Tensor forward(const Tensor& x) override { return both ? a(x) + b(relu(x)) : a(x); }
  nn::Linear a = register_module("a", nn::Linear(6, 4)), b = register_module("b", nn::Linear(6, 4));
  bool sometimes, both = true;
};

/// How a loop trains.
struct JoinMode {
  bool rows = true;     // by loss(); or by the mean of each rank's batch
  bool initial = true;  // JoinOptions::divide_by_initial_world_size
  int every = 1;        // batches a step
  bool no_sync = false;
  bool unused = false;  // find_unused_parameters
  bool zero_after = false;
  double clip = 0;
  std::function<parallel::CommHook()> hook = {};
  double tolerance = 1e-10;
};

/// A share of a step's gradient: that of the summed loss of a batch, divided.
struct Term {
  int rank = 0, batch = 0;
  double divisor = 1;
};
inline std::vector<std::vector<Term>> steps_of(const Counts& counts, const JoinMode& mode) {
  std::vector<std::vector<Term>> steps;
  for (int k = mode.every - 1; k < most(counts); k += mode.every) {
    std::vector<Term>& terms = steps.emplace_back();
    for (int m = k - mode.every + 1; m <= k; ++m) {
      double rows = 0;
      for (const int r : live_in(counts, m)) rows += normalizer_of(r, m);
      const bool dropped = mode.no_sync && !mode.rows && !mode.initial;  // of ranks that end in the middle of a step
      const std::vector<int> counted = live_in(counts, dropped ? k : m);
      const double ranks = static_cast<double>(mode.initial ? counts.size() : counted.size());
      for (const int r : counted) terms.push_back({r, m, mode.rows ? rows : normalizer_of(r, m) * ranks});
    }
  }
  return steps;
}

/// Epochs with a join each against one process. `make` gives an optimizer of parameters; `after` is called with
/// that of the joined model and the rank that join has returned.
template <class Make, class Alone, class After>
void compare_join(const Group& group, const Counts& counts, const JoinMode& mode, const Make& make,
                  const Alone& make_alone, const After& after) {
  const auto net = std::make_shared<JoinNet>(mode.unused), alone = std::make_shared<JoinNet>(mode.unused);
  const double cap = mode.zero_after ? 1e-6 : 1;  // a bucket a parameter, or one
  parallel::DistributedDataParallel ddp(net, {.process_group = group,
                                              .bucket_cap_mb = cap,
                                              .find_unused_parameters = mode.unused,
                                              .first_bucket_mb = cap,
                                              .check_every = 2});
  if (mode.hook) ddp.register_comm_hook(mode.hook());
  auto optimizer = make(net->parameters());
  auto reference = make_alone(alone->parameters());
  const auto lr = [](int epoch, int step) { return 0.1 / (1 + epoch + step); };
  for (int epoch = 0; epoch < (in_full(group) ? 2 : 1); ++epoch) {
    int seen = 0;
    if (mode.every > 1) net->zero_grad();  // of a last step that was not reached
    const int root = ddp.join(
        [&] {
          for (int k = 0; k < own(counts, group); ++k, ++seen) {
            const Batch batch = batch_of(group->rank(), k);
            const bool steps = k % mode.every == mode.every - 1;
            net->see(group->rank(), k);
            if (k % mode.every == 0 && !mode.zero_after) net->zero_grad();
            const auto backward = [&] {
              (mode.rows ? ddp.loss(weighted_loss(), batch.x, batch.y) : weighted_loss()(ddp(batch.x), batch.y))
                  .backward();
            };
            if (mode.no_sync && !steps) {
              const auto guard = ddp.no_sync();
              backward();
            } else {
              backward();
            }
            if (steps) {
              if (mode.clip > 0) nn::utils::clip_grad_norm_(net->parameters(), mode.clip);
              optimizer->set_lr(lr(epoch, k / mode.every));
              optimizer->step();
              if (mode.zero_after) net->zero_grad();
            }
            const NoGradGuard no_grad;  // an evaluation
            (void)ddp(batch.x);
            if (k % 2 == 1) (void)ddp.loss(weighted_loss(), batch.x, batch.y);
          }
        },
        {.divide_by_initial_world_size = mode.initial});
    require(seen == own(counts, group), "every batch is seen");
    require(root == last_rank(counts), "the lowest rank of those that went on longest is returned");
    const auto steps = steps_of(counts, mode);
    for (std::size_t j = 0; j < steps.size(); ++j) {
      alone->zero_grad();
      for (const auto& [rank, k, divisor] : steps[j]) {
        const Batch batch = batch_of(rank, k);
        alone->see(rank, k);
        (weighted_loss().parts((*alone)(batch.x), batch.y).sum * (1 / divisor)).backward();
      }
      if (mode.clip > 0) nn::utils::clip_grad_norm_(alone->parameters(), mode.clip);
      reference->set_lr(lr(epoch, static_cast<int>(j)));
      reference->step();
    }
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      require_close(net->parameters()[i], alone->parameters()[i], mode.tolerance,
                    fmt::format("weight {} after epoch {}", i, epoch));
    after(*optimizer, root);
    parallel::check_consistency(*net, group);
    Tensor defined = zeros({4}, {.dtype = int32});
    for (std::size_t i = 0; i < 4; ++i) defined.data<std::int32_t>()[i] = net->parameters()[i].grad().defined();
    Tensor everywhere = defined.clone();
    group->all_reduce(everywhere, parallel::ReduceOp::max).wait();
    require(mode.every > 1 || equal(defined, everywhere), "a gradient is there on all ranks or on none");
  }
}

/// The same with momentum, which is given to all ranks after each epoch.
inline void compare_join(const Group& group, const Counts& counts, const JoinMode& mode) {
  const auto make = [](std::vector<Tensor> parameters) {
    return std::make_unique<optim::SGD>(std::move(parameters), optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
  };
  compare_join(group, counts, mode, make, make,
               [&](optim::SGD& optimizer, int root) { parallel::broadcast_state(optimizer, group, root); });
}

}  // namespace tandem::test
