// What goes wrong in a join is an error on every rank, and the group goes on.
#include <optional>

#include <tandem/tests/parallel/join_batches.h>

namespace tandem::test {
namespace {

using parallel::CommError;
using parallel::DistributedDataParallel;

std::string name_of(int rank) { return fmt::format("rank {}", rank); }

// The ranks are in step, and a join works.
void require_working(const Group& group, DistributedDataParallel& ddp) {
  Tensor one = ones({3});
  group->all_reduce(one).wait();
  require(one[0].item<float>() == static_cast<float>(group->size()), "the ranks are in step");
  int backwards = 0;
  ddp.join([&] {
    for (int k = 0; k < 1 + group->rank(); ++k, ++backwards) {
      ddp.module()->zero_grad();
      const auto [x, y] = batch_of(group->rank(), k);
      ddp.loss(weighted_loss(), x, y).backward();
    }
  });
  require(backwards == 1 + group->rank(), "a join works");
}

DistributedDataParallel make(const Group& group) {
  return DistributedDataParallel(std::make_shared<JoinNet>(false), {.process_group = group});
}
Tensor join_loss_of(DistributedDataParallel& ddp, const Group& group) {
  const auto [x, y] = batch_of(group->rank(), 0);
  return ddp.loss(weighted_loss(), x, y);
}

void inside_another(const Group& group) {
  DistributedDataParallel ddp = make(group);
  require_error(
      {"[join] " + name_of(group->rank()), "a join is under way in this rank already", "the loop of one join"},
      [&] { ddp.join([&] { ddp.join([] {}); }); });
  require_working(group, ddp);
}

void other_options(const Group& group) {
  if (group->size() == 1) return;
  DistributedDataParallel ddp = make(group);
  require_error({"the ranks join with different options: rank 0 with divide_by_initial_world_size = false, "
                 "throw_on_early_termination = false and",
                 "rank 1 with divide_by_initial_world_size = true"},
                [&] { ddp.join([] {}, {.divide_by_initial_world_size = group->rank() > 0}); });
  require_working(group, ddp);
}

void early_termination(const Group& group) {
  for (const bool caught : {false, true}) {
    DistributedDataParallel ddp = make(group);
    int steps = 0;
    const auto loop = [&](int batches) {
      for (int k = 0; k < batches; ++k, ++steps) join_loss_of(ddp, group).backward();
    };
    ddp.join([&] { loop(2); }, {.throw_on_early_termination = true});
    require(steps == 2, "equal numbers of batches are no error");
    if (group->size() == 1) return;
    require_error(
        {"[join]", "rank 0 has ended, while rank 1 begins the exchange of loss of a DistributedDataParallel (number ",
         "throw_on_early_termination"},
        [&] {
          ddp.join(
              [&] {
                try {
                  loop(group->rank() == 0 ? 1 : 3);
                } catch (const Error&) {
                  if (!caught) throw;
                }
              },
              {.throw_on_early_termination = true});
        });
    require(steps == 3, "the batches that all had are done");
    require_working(group, ddp);
  }
}

// While the others have batches, wait for them to end, or have ended.
void a_body_that_throws(const Group& group) {
  for (const int others : {3, 1, 0}) {
    DistributedDataParallel ddp = make(group);
    const int odd = group->size() - 1;
    const auto loop = [&] {
      for (int k = 0; k < (group->rank() == odd ? 1 : others); ++k) join_loss_of(ddp, group).backward();
      if (group->rank() == odd) throw Error("spilled coffee");
    };
    if (group->rank() == odd) {
      require(require_error({"spilled coffee"}, [&] { ddp.join(loop); }) == "spilled coffee", "the exception itself");
    } else {
      try {
        ddp.join(loop);
        throw Error("no error");
      } catch (const CommError& e) {
        require(e.rank() == odd, "the error is about the rank that has thrown");
        const bool behind = others == 0;
        const std::string says = fmt::format(
            "; the loop of rank {} was over, so that it lacks the others' steps since: "
            "before more training load a checkpoint, or broadcast_state of rank {}, ",
            group->rank(), odd);
        require((std::string_view(e.what()).find(says) != std::string_view::npos) == behind,
                "a rank that lacks steps says so");
        require_error({name_of(odd) + fmt::format(" of {}: its part of the join ended with an error: spilled coffee",
                                                  group->size()),
                       " cannot take part in join (an error ends it, call "},
                      [&] { throw e; });
      }
    }
    require_working(group, ddp);
  }
}

void something_else_thrown(const Group& group) {
  DistributedDataParallel ddp = make(group);
  const auto loop = [&] {
    if (group->rank() == 0) throw 42;
  };
  if (group->rank() > 0) {
    require_error({"rank 0", "ended with an error: an exception of an unknown type"}, [&] { ddp.join(loop); });
  } else {
    int thrown = 0;
    try {
      ddp.join(loop);
    } catch (const int number) {
      thrown = number;
    }
    require(thrown == 42, "what was thrown goes on");
  }
  require_working(group, ddp);
}

void with_reproducible_shards(const Group& group) {
  if (group->size() == 3) return;
  DistributedDataParallel ddp(std::make_shared<JoinNet>(false), {.process_group = group, .reproducible_shards = 4});
  const std::string refused = "[DistributedDataParallel] join is not for reproducible_shards";
  require_error({refused}, [&] { ddp.join([] {}); });
  for (const int batches : {1, group->rank() == group->size() - 1 ? 1 : 0})
    require_error({refused}, [&] {
      parallel::join(
          [&] {
            for (int k = 0; k < batches; ++k) join_loss_of(ddp, group).backward();
          },
          {}, group);
    });
}

void a_root_out_of_range(const Group& group) {
  const auto net = std::make_shared<JoinNet>(false);
  for (const int root : {-1, group->size()})
    require_error({"[broadcast_state]", fmt::format("root {} is out of range", root)},
                  [&] { parallel::broadcast_state(*net, group, root); });
}

// What a wrapped model does not know of is not shadowed.
void calls_of_ones_own(const Group& group) {
  if (group->size() == 1) return;
  DistributedDataParallel ddp = make(group);
  for (const bool twice : {false, true}) {
    require_error({"the ranks disagree", "all_reduce (sum, call ", "rank 0 calls join (the loop is over, call ",
                   "move other calls to after the join"},
                  [&] {
                    ddp.join([&] {
                      Tensor t = ones({3}), u = ones({3});
                      group->all_reduce(t).wait();
                      if (group->rank() == 0) return;
                      if (twice) join_loss_of(ddp, group).backward();
                      group->all_reduce(u).wait();
                    });
                  });
    require_working(group, ddp);
  }
}

void joined_by_some(const Group& group) {
  if (group->size() == 1) return;
  DistributedDataParallel ddp = make(group);
  require_error(
      {"rank 0 calls join (at its start, call ", "calls barrier (call ", "every rank of the group calls join"}, [&] {
        if (group->rank() == 0)
          ddp.join([] {});
        else
          group->barrier().wait();
      });
  require_working(group, ddp);
}

void different_calls(const Group& group) {
  if (group->size() == 1) return;
  DistributedDataParallel ddp = make(group);
  require_error(
      {"in a join the ranks disagree: rank 0 begins the exchange of loss of a DistributedDataParallel (number ",
       "rank 1 begins a backward of a DistributedDataParallel (number ", "must do the same"},
      [&] {
        ddp.join([&] {
          if (group->rank() == 0)
            join_loss_of(ddp, group).backward();
          else
            sum(ddp(batch_of(0, 0).x)).backward();
        });
      });
  require_working(group, ddp);
}

// An error that the ranks with batches get over is none for those that have ended.
void an_error_that_is_caught(const Group& group) {
  const auto net = std::make_shared<JoinNet>(false);
  DistributedDataParallel ddp(net, {.process_group = group});
  int errors = 0;
  ddp.join([&] {
    for (int k = 0; k < (group->rank() == 0 ? 1 : 4); ++k) {
      net->zero_grad();
      net->both = k % 2 == 0;  // else a parameter gets no gradient
      try {
        join_loss_of(ddp, group).backward();
      } catch (const Error&) {
        ++errors;
      }
    }
    net->both = true;
  });
  require(errors == (group->rank() == 0 ? 0 : 2), "the ranks with batches have the errors");
  require_working(group, ddp);
}

void a_model_that_is_gone(const Group& group) {
  if (group->size() == 1) return;
  DistributedDataParallel ddp = make(group);
  std::optional<DistributedDataParallel> gone(std::in_place, std::make_shared<JoinNet>(false),
                                              parallel::DistributedDataParallelOptions{.process_group = group});
  require_error({"rank 0", "its loop is over, and the model or optimizer (number ",
                 ") with which others go on was destroyed here; keep it until the join has ended"},
                [&] {
                  ddp.join([&] {
                    if (group->rank() == 0) return gone.reset();
                    const auto [x, y] = batch_of(group->rank(), 0);
                    sum((*gone)(x)).backward();
                  });
                });
  require_working(group, ddp);
}

// Also where only some ranks come to it.
void made_inside(const Group& group) {
  DistributedDataParallel ddp = make(group);
  for (const bool all : {true, false}) {
    const auto inside = [&](const auto& makes) {
      return [&] {
        ddp.join([&] {
          if (all || group->rank() == group->size() - 1) makes();
        });
      };
    };
    require_error({"[DistributedDataParallel] rank ", "a model is wrapped in a join; wrap it before the join"},
                  inside([&] { make(group); }));
    require_error(
        {"[ZeroRedundancyOptimizer] rank ", "a divided optimizer is made in a join; make it before the join"},
        inside([&] { parallel::ZeroRedundancyOptimizer::make<optim::SGD>(ddp.parameters(), {.lr = 0.1}, group); }));
    require_working(group, ddp);
  }
}

}  // namespace

std::vector<DdpCase> join_failure_cases() {
  return {{"join: inside another", inside_another},
          {"join: other options", other_options},
          {"join: early termination", early_termination},
          {"join: a body that throws", a_body_that_throws},
          {"join: something else thrown", something_else_thrown},
          {"join: with reproducible shards", with_reproducible_shards},
          {"join: a root out of range", a_root_out_of_range},
          {"join: calls of one's own", calls_of_ones_own},
          {"join: joined by some", joined_by_some},
          {"join: different calls", different_calls},
          {"join: an error that is caught", an_error_that_is_caught},
          {"join: a model that is gone", a_model_that_is_gone},
          {"join: made inside", made_inside}};
}

}  // namespace tandem::test
