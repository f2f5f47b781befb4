// What happens when a communication hook does not do what it must.
#include <tandem/tests/parallel/hook_net.h>
#include <tandem/tests/parallel/spy_group.h>

namespace tandem::test {
namespace {

using parallel::DistributedDataParallel;
using parallel::GradBucket;
using parallel::ReduceOp;
using parallel::Work;
using Net = HookNet;

// The hook of one rank throws at one of its places. The others learn it where they would wait for that rank; then all
// go on in step.
void a_hook_that_throws(const Group& group) {
  enum Place { never, call, second, end };
  for (const bool find : {false, true}) {
    const double cap = find ? 1e-5 : 1.0;
    const auto net = std::make_shared<Net>(float64), plain = std::make_shared<Net>(float64);
    const parallel::DistributedDataParallelOptions options{
        .process_group = group, .bucket_cap_mb = cap, .find_unused_parameters = find, .first_bucket_mb = cap};
    DistributedDataParallel ddp(net, options), reference(plain, options);
    Place place = never;
    bool known = true;
    const auto spill = [&](Place here, const GradBucket& bucket) {
      if (place != here || group->rank() != group->size() - 1 || bucket.index() != 0) return;
      if (known) throw Error("spilled coffee");
      throw 7;
    };
    ddp.register_comm_hook({"careless", [&](GradBucket& bucket) {
                              spill(call, bucket);
                              Work work = parallel::then(group->all_reduce(bucket.buffer(), ReduceOp::avg), group, [&] {
                                spill(second, bucket);
                                return group->broadcast(bucket.buffer(), 0);
                              });
                              return parallel::then(work, [&] { spill(end, bucket); });
                            }});
    const auto step = [&] { backward(ddp, *net, float64, group->rank(), 0, false); };
    for (const Place p : {end, call, second})
      for (int round = 0; round < 2; ++round) {  // before and after the order is rebuilt
        place = p;
        known = round == 0;
        if (group->rank() == group->size() - 1) {
          bool seen = false;
          try {
            step();
          } catch (const Error& e) {
            seen = known && std::string(e.what()) == "spilled coffee";
          } catch (const int number) {
            seen = number == 7;
          }
          require(seen, "the rank throws what its hook has thrown");
        } else if (p != end) {
          require_error({fmt::format("rank {} cannot take part in", group->size() - 1),
                         p == call ? "the communication hook 'careless' ended with an error: "
                                   : "what follows a collective ended with an error: ",
                         known ? "spilled coffee" : "an exception of another kind"},
                        [&] { step(); });
        } else {
          step();
        }
        place = never;
        require_good_step(ddp, *net, reference, *plain, group->rank());
      }
  }
}

void a_hook_that_miscounts(const Group& group) {
  const auto net = std::make_shared<Net>(float64);
  DistributedDataParallel ddp(net, {.process_group = group, .bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5});
  int collectives = 0;
  ddp.register_comm_hook({"miscounts", [&](GradBucket& bucket) {
                            Work work;
                            for (int i = 0; i < collectives; ++i) work = group->all_reduce(bucket.buffer());
                            return work;
                          }});
  for (const int count : {0, 2, 1, 0, 1}) {
    collectives = count;
    const auto step = [&] { mean(ddp(wave({4, 6}, 1))).backward(); };
    if (count == 1)
      step();
    else
      require_error({"'miscounts' ", count == 0 ? "has started 0 collectives" : "wants to start a second collective",
                     "it must start one"},
                    step);
  }
}

// All that a hook has started ends before the backward does, whatever it returns.
void a_hook_that_returns_another_work(const Group& group) {
  const auto net = std::make_shared<Net>(float64), plain = std::make_shared<Net>(float64);
  const parallel::DistributedDataParallelOptions options{
      .process_group = group, .bucket_cap_mb = 1e-3, .first_bucket_mb = 1e-3};
  DistributedDataParallel ddp(net, options), reference(plain, options);
  int kind = 0;
  ddp.register_comm_hook({"forgetful", [&](GradBucket& bucket) {
                            if (kind < 2) {
                              Work work = group->all_reduce(bucket.buffer(), ReduceOp::avg);
                              if (kind == 1) work.wait();
                              return Work();
                            }
                            Tensor copy = bucket.buffer().clone();
                            Work work = group->all_reduce(copy, ReduceOp::avg);
                            parallel::then(work, [copy, &bucket] { bucket.buffer().copy_(copy); });
                            return work;
                          }});
  for (; kind < 3; ++kind) {
    net->zero_grad();
    plain->zero_grad();
    backward(ddp, *net, float64, group->rank(), kind, false);
    backward(reference, *plain, float64, group->rank(), kind, false);
    for (std::size_t i = 0; i < 6; ++i)
      require(equal(net->parameters()[i].grad(), plain->parameters()[i].grad()), fmt::format("the average, {}", kind));
  }
}

// The hook of one rank throws after it has started its collective, or starts more or fewer than the others: where they
// may wait for something that follows, they are told, and all are in step again.
void a_rank_out_of_step(const Group& group) {
  struct Row {
    const char* kind;
    const char* error;
    bool told = false;  // the others cannot go on
  };
  const Row rows[] = {{"late", "spilled coffee", true},
                      {"between", "spilled coffee", true},
                      {"next between", "spilled coffee", true},
                      {"late, chained", "spilled coffee", true},
                      {"two", "'late' wants to start a second collective", true},
                      {"caught", "'late' wants to start a second collective", true},
                      {"next two", "what follows a work wants to start a second collective", true},
                      {"next none", "what follows a work has started no collective", true},
                      {"plain", "without a group it communicates nothing"}};
  const int odd = group->size() - 1;
  for (const Row& row : rows) {
    const std::string kind = row.kind;
    const auto net = std::make_shared<Net>(float64), plain = std::make_shared<Net>(float64);
    const parallel::DistributedDataParallelOptions options{
        .process_group = group, .bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5};
    DistributedDataParallel ddp(net, options), reference(plain, options);
    int step = 0;
    ddp.register_comm_hook({"late", [&](GradBucket& bucket) {
                              const bool now = step == 1 && group->rank() == odd && bucket.index() == 0;
                              const auto start = [&] { return group->all_reduce(bucket.buffer(), ReduceOp::avg); };
                              Work work = start();
                              if (kind == "late") check(!now, "test", "spilled coffee");
                              if (kind == "late" || kind == "plain") {
                                return parallel::then(work, [start, now] {
                                  if (now) start().wait();
                                });
                              }
                              if (kind == "two") return now ? start() : work;
                              if (now && kind == "caught") {
                                try {
                                  start();
                                } catch (const Error&) {
                                }
                              }
                              if (kind == "between") check(!now, "test", "spilled coffee");
                              work = parallel::then(work, group, [now, kind, group, &bucket] {
                                if (now && kind == "next none") return Work();
                                Work second = group->broadcast(bucket.buffer(), 0);
                                if (kind == "next between") {
                                  check(!now, "test", "spilled coffee");
                                  return parallel::then(
                                      second, group, [group, &bucket] { return group->broadcast(bucket.buffer(), 0); });
                                }
                                return now && kind == "next two" ? group->all_reduce(bucket.buffer()) : second;
                              });
                              if (kind == "late, chained") check(!now, "test", "spilled coffee");
                              return work;
                            }});
    for (; step < 4; ++step) {
      net->zero_grad();
      plain->zero_grad();
      backward(reference, *plain, float64, group->rank(), step, false);
      const auto run = [&] { backward(ddp, *net, float64, group->rank(), step, false); };
      if (step == 1 && group->rank() == odd) {
        require_error({row.error}, run);
        continue;
      }
      if (step == 1 && row.told) {
        require_error({fmt::format("rank {} cannot take part", odd), row.error}, run);
        continue;
      }
      run();
      for (std::size_t i = 0; i < 6; ++i)
        require_close(net->parameters()[i].grad(), plain->parameters()[i].grad(), 1e-12, kind);
    }
  }
}

// The hook of one rank throws where the others may be in its collective's successor, or may not: from then on every
// call fails on every rank, by name.
void a_rank_that_gives_up(const Group& group) {
  if (group->size() == 1) return;
  const int odd = group->size() - 1;
  for (const bool in_next : {false, true})
    for (const bool follows : {false, true}) {
      const auto own = std::make_shared<Spy>(group);
      const auto net = std::make_shared<Net>(float64);
      DistributedDataParallel ddp(net, {.process_group = own, .bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5});
      bool now = false;
      const auto blocking = [&](const GradBucket& bucket, Tensor buffer, int round) {
        own->all_reduce(buffer, ReduceOp::avg).wait();
        check(!now || in_next != (round == 1) || group->rank() != odd || bucket.index() != 0, "test", "spilled coffee");
        return Work();
      };
      ddp.register_comm_hook(
          {"blocking", [&](GradBucket& bucket) {
             Work work = blocking(bucket, bucket.buffer(), 0);
             if (in_next) work = parallel::then(work, own, [&] { return blocking(bucket, bucket.buffer(), 1); });
             if (!follows) return work;
             return parallel::then(work, own, [&] { return own->all_reduce(bucket.buffer(), ReduceOp::avg); });
           }});
      const auto step = [&] { backward(ddp, *net, float64, group->rank(), 0, false); };
      step();
      now = true;
      try {
        step();
        require(group->rank() != odd, "the rank throws what its hook has thrown");
      } catch (const Error& e) {
        const std::string text = e.what();
        require(text.find("spilled coffee") != std::string::npos, text);
        require(text.find(in_next ? "what follows a collective" : "'blocking'") != std::string::npos ||
                    group->rank() == odd,
                text);
      }
      now = false;
      for (int i = 0; i < 3; ++i) {
        Tensor number = ones({1});
        require_error({fmt::format("rank {} of {}: ", odd, group->size()),
                       in_next ? "what follows a collective" : "the communication hook 'blocking'",
                       "the process group is of no use any more", "spilled coffee"},
                      [&] { own->all_reduce(number).wait(); });
      }
      require_error({"spilled coffee"}, step);
      while (own->calls.size() < 100) own->fail("spilled coffee");  // until the group below is in step again
      group->barrier().wait();
    }
}

void a_hook_that_replaces_the_buffer(const Group& group) {
  const auto net = std::make_shared<Net>(float64), plain = std::make_shared<Net>(float64);
  DistributedDataParallel ddp(net, {.process_group = group}), reference(plain, {.process_group = group});
  int step = 0;
  ddp.register_comm_hook({"replaces", [&](GradBucket& bucket) {
                            if (step == 0) bucket.buffer() = bucket.buffer() * 1.0;
                            Work work = group->all_reduce(bucket.buffer(), ReduceOp::avg);
                            return parallel::then(work, [&] {
                              if (step == 2) bucket.buffer() = bucket.buffer().to(float32);
                            });
                          }});
  for (; step < 4; ++step) {
    net->zero_grad();
    plain->zero_grad();
    backward(reference, *plain, float64, group->rank(), step, false);
    const auto run = [&] { backward(ddp, *net, float64, group->rank(), step, false); };
    if (step % 2 == 0) {
      require_error({"another tensor in place of the buffer of bucket 0", "buffer().copy_(...)"}, run);
      continue;
    }
    run();
    for (std::size_t i = 0; i < 6; ++i)
      require_close(net->parameters()[i].grad(), plain->parameters()[i].grad(), 1e-12, "after it was replaced");
  }
}

// A hook that was made for all ranks, of a model that some of them train.
void a_hook_of_another_group(const Group& group) {
  const auto net = std::make_shared<Net>(float64);
  const auto spy = std::make_shared<Spy>(group);
  DistributedDataParallel ddp(net, {.process_group = spy});
  ddp.register_comm_hook(parallel::fp16_compress_hook(group));
  require_error({"'fp16_compress' has started 0 collectives", "works in another group", "fp16_compress_hook(group)"},
                [&] { backward(ddp, *net, float64, group->rank(), 0, false); });
}

}  // namespace

std::vector<DdpCase> hook_fault_cases() {
  return {{"a hook that throws", a_hook_that_throws},
          {"a hook that miscounts", a_hook_that_miscounts},
          {"a hook that returns another work", a_hook_that_returns_another_work},
          {"a rank out of step", a_rank_out_of_step},
          {"a rank that gives up", a_rank_that_gives_up},
          {"a hook that replaces the buffer", a_hook_that_replaces_the_buffer},
          {"a hook of another group", a_hook_of_another_group}};
}

}  // namespace tandem::test
