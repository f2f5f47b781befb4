// Communication hooks: what becomes of gradients.
#include <limits>

#include <tandem/tests/parallel/hook_net.h>
#include <tandem/tests/parallel/spy_group.h>

namespace tandem::test {
namespace {

using parallel::CommHook;
using parallel::DistributedDataParallel;
using parallel::GradBucket;
using parallel::ReduceOp;
using parallel::Work;
using Net = HookNet;

// The average by two collectives and a continuation of each kind.
CommHook sum_of_parts_hook(const Group& group) {
  return {"sum of parts", [group](GradBucket& bucket) {
            Tensor all = empty({group->size(), bucket.buffer().numel()}, {.dtype = bucket.buffer().dtype()});
            Tensor part = empty({bucket.buffer().numel()}, {.dtype = bucket.buffer().dtype()});
            Work work = parallel::then(group->all_gather(all, bucket.buffer()), group, [=]() mutable {
              part.copy_(mean(all, {0}));
              return group->broadcast(part, 0);
            });
            return parallel::then(work, [part, &bucket] { bucket.buffer().copy_(part); });
          }};
}

// Every hook in every mode gives the gradients that averaging gives, within its precision.
void every_hook_in_every_mode(const Group& group) {
  struct Row {
    CommHook (*make)(const Group&);
    double tolerance;
  };
  const Row rows[] = {
      {[](const Group& g) { return parallel::allreduce_hook(g); }, 0},
      {[](const Group& g) { return parallel::fp16_compress_hook(g); }, 2e-3},
      {[](const Group& g) { return parallel::bf16_compress_hook(g); }, 2e-2},
      {sum_of_parts_hook, 1e-5},
      // Of full rank: nothing is left out.
      {[](const Group& g) {
         return parallel::PowerSGD(
                    {.matrix_approximation_rank = 8, .start_powersgd_iter = 1, .min_compression_rate = 0.01}, g)
             .hook();
       },
       1e-5}};
  struct Mode {
    DType dtype;
    bool find;
    double cap;
  };
  const Mode modes[] = {{float32, false, 1e-4}, {float64, true, 1e-4}, {float64, false, 1.0}};
  for (const Row& row : rows)
    for (const auto& [dtype, find, cap] : modes) {
      const auto net = std::make_shared<Net>(dtype), plain = std::make_shared<Net>(dtype);
      const parallel::DistributedDataParallelOptions options{
          .process_group = group, .bucket_cap_mb = cap, .find_unused_parameters = find, .first_bucket_mb = cap};
      DistributedDataParallel ddp(net, options), reference(plain, options);
      ddp.register_comm_hook(row.make(group));
      const double tolerance = dtype == float64 && row.tolerance == 1e-5 ? 1e-12 : row.tolerance;
      for (int step = 0; step < 4; ++step) {
        if (step != 1) {
          net->zero_grad();
          plain->zero_grad();
        }
        if (step == 3) {  // accumulated before it is averaged
          const auto guard = ddp.no_sync(), other = reference.no_sync();
          backward(ddp, *net, dtype, group->rank(), 10, false);
          backward(reference, *plain, dtype, group->rank(), 10, false);
        }
        backward(ddp, *net, dtype, group->rank(), step, find);
        backward(reference, *plain, dtype, group->rank(), step, find);
        std::vector<Tensor> all;
        for (std::size_t i = 0; i < 6; ++i) {
          const Tensor a = net->parameters()[i].grad(), b = plain->parameters()[i].grad();
          require(a.defined() == b.defined(), "a gradient");
          if (!a.defined()) continue;
          require_close(a, b, tolerance, "a gradient by a hook");
          all.push_back(a.flatten());
        }
        Tensor low = cat(all), high = low.clone();
        group->all_reduce(low, ReduceOp::min).wait();
        group->all_reduce(high, ReduceOp::max).wait();
        require(equal(low, high), "all ranks have the same bits");
      }
    }
}

void losses_are_exact(const Group& group) {
  const auto net = make_mlp(float64, 0), alone = make_mlp(float64, 0);
  DistributedDataParallel ddp(net, {.process_group = group});
  ddp.register_comm_hook(sum_of_parts_hook(group));
  const nn::CrossEntropyLoss criterion;
  const Tensor x = wave({7, 6}, 1), y = labels(7, 4, 1);
  ddp.loss(criterion, part(x, group), part(y, group)).backward();
  criterion((*alone)(x), y).backward();
  for (std::size_t i = 0; i < 4; ++i)
    require_close(net->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-12, "the gradient of all rows");
}

// Rounded once on the way in, combined in float32, rounded once more.
void compressed_bits(const Group& group) {
  for (const DType dtype : {float32, float64})
    for (const bool half : {true, false}) {
      Tensor buffer = wave({100}, group->rank(), dtype).mul_(1e-3 * (group->rank() + 1));
      Tensor expected = buffer.to(half ? float16 : bfloat16).to(float32);
      group->all_reduce(expected, ReduceOp::avg).wait();
      expected = expected.to(half ? float16 : bfloat16).to(dtype);
      GradBucket bucket(0, true, buffer, {"p"}, {buffer.view({10, 10})});
      const CommHook hook = half ? parallel::fp16_compress_hook(group) : parallel::bf16_compress_hook(group);
      hook.run(bucket).wait();
      require(equal(bucket.buffer(), expected), "the bits of the compressed average");
      buffer.fill_(group->rank() == 0 ? 1e6 : 0.0);
      hook.run(bucket).wait();
      require(std::isinf(buffer.to_vector<double>()[3]) == half, "beyond float16's range is infinite");
    }
  // What has 16 bits already travels as it is.
  Tensor small = ones({6}).mul_(group->rank()).to(bfloat16);
  GradBucket bucket(0, true, small, {"p"}, {small});
  const auto spy = std::make_shared<Spy>(group);
  parallel::fp16_compress_hook(spy).run(bucket).wait();
  require(spy->reduced_bytes == 12, "16 bits");
  require_close(bucket.buffer().to(float32), full({6}, 0.5 * (group->size() - 1)), 1e-6, "the average");
}

// What the hook is shown, and how often it is called.
void what_a_hook_sees(const Group& group) {
  const auto net = std::make_shared<Net>(float32);
  DistributedDataParallel ddp(net, {.process_group = group, .bucket_cap_mb = 1e-4, .first_bucket_mb = 1e-4});
  std::vector<std::string> seen;
  int next = 0;
  std::string wrong;
  ddp.register_comm_hook({"look", [&](GradBucket& bucket) {
                            if (bucket.index() != next) wrong = "the order of buckets";
                            next = bucket.is_last() ? 0 : next + 1;
                            if (grad_enabled()) wrong = "grad mode";
                            for (std::size_t i = 0; i < bucket.names().size(); ++i) {
                              seen.push_back(bucket.names()[i]);
                              for (const auto& [name, p] : net->named_parameters())
                                if (name == seen.back() && (bucket.gradients()[i].shape() != p.shape() ||
                                                            bucket.gradients()[i].raw().data != p.grad().raw().data))
                                  wrong = "the gradients are views";
                            }
                            return group->all_reduce(bucket.buffer(), ReduceOp::avg);
                          }});
  for (int step = 0; step < 3; ++step) {
    seen.clear();
    backward(ddp, *net, float32, group->rank(), step, false);
    require(seen.size() == 6 && next == 0, "each parameter once, the last bucket at the end");
    require(wrong.empty(), wrong);
    std::vector<std::string> planned;
    for (const auto& bucket : ddp.logging_data().buckets)
      planned.insert(planned.end(), bucket.parameters.begin(), bucket.parameters.end());
    require(seen == planned, "buckets in the order of the plan");
  }
  {
    const auto guard = ddp.no_sync();
    seen.clear();
    backward(ddp, *net, float32, group->rank(), 0, false);
    require(seen.empty(), "no_sync calls no hook");
  }
}

// All first collectives come before what follows them, and that comes bucket by bucket.
void order_of_continuations(const Group& group) {
  const auto net = std::make_shared<Net>(float32);
  const auto spy = std::make_shared<Spy>(group);
  DistributedDataParallel ddp(net, {.process_group = spy, .bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5});
  const std::size_t buckets = ddp.logging_data().buckets.size();
  std::vector<int> followed;
  ddp.register_comm_hook({"two", [&](GradBucket& bucket) {
                            return parallel::then(spy->all_reduce(bucket.buffer(), ReduceOp::avg), spy, [&] {
                              followed.push_back(bucket.index());
                              return spy->broadcast(bucket.buffer(), 0);
                            });
                          }});
  backward(ddp, *net, float32, group->rank(), 0, false);
  net->zero_grad();
  backward(ddp, *net, float32, group->rank(), 1, false);  // the order is rebuilt
  followed.clear();
  spy->calls.clear();
  backward(ddp, *net, float32, group->rank(), 2, false);
  require(buckets == 6 && followed == std::vector<int>{0, 1, 2, 3, 4, 5}, "what follows comes bucket by bucket");
  for (std::size_t i = 0; i < 12; ++i)
    require(spy->calls[i] == (i < 6 ? "all_reduce" : "broadcast"), "first all that can start");
}

void registering(const Group& group) {
  const auto net = std::make_shared<Net>(float32);
  DistributedDataParallel ddp(net, {.process_group = group});
  require_error({"'hollow' is empty; give it a function"}, [&] { ddp.register_comm_hook({"hollow", {}}); });
  if (group->size() > 1)
    for (const bool alone : {true, false}) {  // one rank has a hook, or has another than the others
      DistributedDataParallel differs(std::make_shared<Net>(float32), {.process_group = group});
      CommHook odd = parallel::allreduce_hook(group);
      if (group->rank() == 1) odd.name = "another";
      if (group->rank() == 1 || !alone) differs.register_comm_hook(std::move(odd));
      for (int i = 0; i < 2; ++i)
        require_error({"the ranks differ", "communication hook", alone ? "none" : "'allreduce'", "'another'",
                       "call register_comm_hook on every rank"},
                      [&] {
                        mean(differs(wave({4, 6}, 1, float32))).backward();
                      });
    }
  ddp.register_comm_hook(parallel::allreduce_hook(group));
  require_error({"has the communication hook 'allreduce' already"},
                [&] { ddp.register_comm_hook(parallel::fp16_compress_hook(group)); });
  backward(ddp, *net, float32, group->rank(), 0, false);
  DistributedDataParallel late(std::make_shared<Net>(float32), {.process_group = group});
  mean(late(wave({4, 6}, 1, float32))).backward();
  require_error({"'allreduce' comes after the first backward"},
                [&] { late.register_comm_hook(parallel::allreduce_hook(group)); });
}

// A rank that cannot complete a bucket, under a hook that sends twice for each.
void a_refused_bucket(const Group& group) {
  const auto net = std::make_shared<Net>(float64), plain = std::make_shared<Net>(float64);
  const parallel::DistributedDataParallelOptions options{
      .process_group = group, .bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5};
  DistributedDataParallel ddp(net, options), reference(plain, options);
  ddp.register_comm_hook(sum_of_parts_hook(group));
  const int odd = group->size() - 1;
  for (int round = 0; round < 2; ++round) {
    require_error({fmt::format("rank {} of {}: parameter", odd, group->size()), "got no gradient in this backward"},
                  [&] {
                    net->use_b = group->rank() != odd;
                    mean(ddp(wave({4, 6}, 1))).backward();
                  });
    require_good_step(ddp, *net, reference, *plain, group->rank());
  }
}

void a_backward_in_a_hook(const Group& group) {
  const auto net = std::make_shared<Net>(float64);
  DistributedDataParallel ddp(net, {.process_group = group});
  Tensor inner = mean(ddp(wave({4, 6}, 1)));
  ddp.register_comm_hook({"nested", [&](GradBucket& bucket) {
                            if (inner.defined()) std::exchange(inner, {}).backward();
                            return group->all_reduce(bucket.buffer(), ReduceOp::avg);
                          }});
  require_error({"began inside another one"}, [&] { mean(ddp(wave({4, 6}, 2))).backward(); });
  mean(ddp(wave({4, 6}, 2))).backward();
}

// The pieces of which hooks are made, without a model.
void continuations(const Group& group) {
  Tensor t = full({3}, 1.0);
  int runs = 0;
  Work local = parallel::then(group->all_reduce(t), [&] { ++runs; });
  Work chain = parallel::then(local, group, [&] {
    require(runs == 1, "one after the other");
    return group->all_reduce(t);
  });
  for (int i = 0; i < 100; ++i) require(!chain.is_completed(), "what starts a collective starts it in wait alone");
  require(!chain.wait(0.001) && !chain.exception(), "and not in a wait with a limit");
  chain.wait();
  chain.wait();
  require(chain.is_completed() && !chain.exception() && chain.wait(0) && runs == 1, "once");
  require_close(t, full({3}, group->size() * group->size()), 1e-6, "both sums");
  Work done = parallel::then(Work(), [&] { ++runs; });
  require(done.is_completed() && runs == 1, "asking does not run it");
  require(done.wait(0) && runs == 2, "a wait that need not wait does");

  // A first work that fails on all ranks: what follows is not run on any.
  Tensor odd = full({group->rank() == 0 && group->size() > 1 ? 4 : 3}, 1.0);
  if (group->size() > 1) {
    Work failing = parallel::then(group->all_reduce(odd), group, [&] {
      ++runs;
      return group->all_reduce(t);
    });
    const std::string text = require_error({"the ranks disagree"}, [&] { failing.wait(); });
    require(require_error({}, [&] { failing.wait(); }) == text && failing.exception(), "every wait throws it");
    require(runs == 2 && !failing.failed_alone(), "what follows has not run");
  }
  // One that fails on one rank alone: the others are told when they start what follows.
  const bool careless = group->rank() == group->size() - 1;
  Work alone = parallel::then(group->all_reduce(t), [&] { check(!careless, "test", "spilled coffee"); });
  Work after = parallel::then(alone, [] {});
  Work told = parallel::then(after, group, [&] { return group->all_reduce(t); });
  require_error({"spilled coffee"}, [&] { told.wait(); });
  require(alone.failed_alone() == careless && after.failed_alone() == careless, "known to have failed alone");
  require(!told.failed_alone(), "the others know");
  // What has called its collective before it throws is as if it had not: the others may go on to another.
  Work late = parallel::then(Work(), group, [&] {
    Work work = group->all_reduce(t);
    check(!careless, "test", "spilled tea");
    return work;
  });
  require_error({"spilled tea"}, [&] { late.wait(); });
  require(!late.failed_alone(), "the others know");
  Work itself;
  itself = parallel::then(Work(), [&] { itself.wait(); });
  require_error({"waits for that same work"}, [&] { itself.wait(); });
  require_error({"the group is null"}, [&] { parallel::then(Work(), nullptr, [] { return Work(); }); });
  const std::uint64_t before = group->call_count();
  group->barrier().wait();
  require(group->call_count() == before + 1, "collectives are counted");
}

}  // namespace

std::vector<DdpCase> hook_cases() {
  return {{"every hook in every mode", every_hook_in_every_mode},
          {"losses are exact with a hook", losses_are_exact},
          {"compressed bits", compressed_bits},
          {"what a hook sees", what_a_hook_sees},
          {"order of continuations", order_of_continuations},
          {"registering a hook", registering},
          {"a refused bucket with a hook", a_refused_bucket},
          {"a backward in a communication hook", a_backward_in_a_hook},
          {"continuations", continuations}};
}

}  // namespace tandem::test
