// A process group whose ranks are threads of this process.
#pragma once
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include <tandem/tandem.h>

namespace tandem::test {

struct LocalRounds {
  struct Round {
    std::vector<parallel::Collective> parts;
    std::vector<std::exception_ptr> errors;
    int arrived = 0;
    bool done = false;
  };
  explicit LocalRounds(int n) : size(n) {}
  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::uint64_t, Round> rounds;
};

class LocalGroup final : public parallel::ProcessGroup {
 public:
  LocalGroup(std::shared_ptr<LocalRounds> shared, int rank) : shared_(std::move(shared)), rank_(rank) {}
  std::string backend() const override { return "local"; }
  int rank() const override { return rank_; }
  int size() const override { return shared_->size; }

 protected:
  parallel::Work start(const parallel::Collective& c) override {
    const std::uint64_t number = count_++;
    const std::lock_guard lock(shared_->mutex);
    LocalRounds::Round& round = shared_->rounds[number];
    round.parts.resize(static_cast<std::size_t>(size()));
    round.errors.resize(static_cast<std::size_t>(size()));
    round.parts[static_cast<std::size_t>(rank_)] = c;
    if (++round.arrived == size()) {
      execute(round, number);
      round.done = true;
      shared_->changed.notify_all();
    }
    struct State final : parallel::Work::State {
      std::shared_ptr<LocalRounds> shared;
      std::uint64_t number = 0;
      std::size_t rank = 0;
      bool poll() override {
        const std::lock_guard guard(shared->mutex);
        return shared->rounds[number].done;
      }
      void wait() override {
        std::unique_lock guard(shared->mutex);
        LocalRounds::Round& r = shared->rounds[number];
        if (!shared->changed.wait_for(guard, std::chrono::seconds(20), [&] { return r.done; }))
          throw parallel::CommError(-1, fmt::format("rank {}: timeout in call {}", rank, number));
        if (r.errors[rank]) std::rethrow_exception(r.errors[rank]);
      }
    };
    auto state = std::make_shared<State>();
    state->shared = shared_;
    state->number = number;
    state->rank = static_cast<std::size_t>(rank_);
    return parallel::Work(std::move(state));
  }

 private:
  static Tensor tree(std::vector<parallel::Collective>& parts, parallel::ReduceOp op, std::size_t lo, std::size_t hi) {
    if (hi - lo == 1) return parts[lo].input.clone();
    const std::size_t middle = lo + (hi - lo + 1) / 2;
    Tensor a = tree(parts, op, lo, middle);
    const Tensor b = tree(parts, op, middle, hi);
    if (op == parallel::ReduceOp::max) return where(a > b, a, b);
    return a.add_(b);
  }
  void execute(LocalRounds::Round& round, std::uint64_t number) {
    const NoGradGuard no_grad;
    using parallel::Operation;
    auto& parts = round.parts;
    for (std::size_t r = 0; r < parts.size(); ++r)
      for (std::size_t k = 0; k < parts.size(); ++k) {
        const bool failed = parts[k].operation == Operation::fail;
        if (parts[r].operation == Operation::fail || round.errors[r]) continue;
        if (failed)
          round.errors[r] = std::make_exception_ptr(
              parallel::CommError(static_cast<int>(k), fmt::format("rank {} of {}: {}", r, size(), parts[k].message)));
        else if (const auto a = fingerprint(parts[r], number), b = fingerprint(parts[k], number); a != b)
          round.errors[r] = std::make_exception_ptr(parallel::CommError(
              static_cast<int>(k),
              fmt::format("rank {} of {}: the ranks disagree: {} and {}", r, size(), describe(a), describe(b))));
      }
    for (const auto& error : round.errors)
      if (error) return;
    const parallel::Collective first = parts.front();
    if (first.operation == Operation::all_reduce) {
      Tensor sum = tree(parts, first.op, 0, parts.size());
      if (first.op == parallel::ReduceOp::avg) sum.div_(static_cast<double>(size()));
      for (auto& p : parts) p.output.copy_(sum);
    } else if (first.operation == Operation::broadcast) {
      const Tensor root = parts[static_cast<std::size_t>(first.root)].input;
      for (auto& p : parts)
        if (p.output.defined()) p.output.copy_(root);
    } else if (first.operation == Operation::all_gather) {
      for (auto& p : parts)
        for (std::size_t k = 0; k < parts.size(); ++k)
          p.output.view({size(), -1})[static_cast<std::int64_t>(k)].copy_(parts[k].input.view({-1}));
    }
  }

  std::shared_ptr<LocalRounds> shared_;
  int rank_;
  std::uint64_t count_ = 0;
};

/// Runs `body(group)` on n threads; throws the first error of the lowest rank.
template <class Body>
void run_ranks(int n, const Body& body) {
  auto shared = std::make_shared<LocalRounds>(n);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(n));
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r)
    threads.emplace_back([&, r] {
      try {
        body(std::make_shared<LocalGroup>(shared, r));
      } catch (...) {
        errors[static_cast<std::size_t>(r)] = std::current_exception();
      }
    });
  for (std::thread& t : threads) t.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace tandem::test
