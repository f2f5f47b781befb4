// loss(): the loss of all ranks' rows, whatever each rank has.
#include <tandem/tests/parallel/ddp_cases.h>

namespace tandem::test {
namespace {

using parallel::DistributedDataParallel;

// The gradients of `mine` on this rank's rows against those of `whole` on all, and the value.
template <class Whole, class Mine>
void compare(const Group& group, std::int64_t rows, const Whole& whole, const Mine& mine, std::string_view what) {
  const auto alone = make_mlp(), net = make_mlp();
  DistributedDataParallel ddp(net, {.process_group = group});
  const Tensor x = wave({rows, 6}, 1), target = wave({rows, 4}, 2);
  const Tensor expected = whole((*alone)(x), target);
  expected.backward();
  const Tensor loss = mine(ddp, part(x, group), part(target, group));
  require_close(average(loss, group), expected, 1e-12, fmt::format("{}: the value", what));
  loss.backward();
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    require_close(net->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-12, what);
}

void reductions(const Group& group) {
  for (const std::int64_t rows : {9, 2, 1}) {
    for (const Reduction reduction : {Reduction::mean, Reduction::sum}) {
      const nn::MSELoss mse({.reduction = reduction});
      compare(
          group, rows, [&](const Tensor& y, const Tensor& t) { return mse(y, t); },
          [&](DistributedDataParallel& ddp, const Tensor& x, const Tensor& t) { return ddp.loss(mse, x, t); }, "mse");
      const auto absolute = [&](const Tensor& y, const Tensor& t) {
        const Tensor a = sum(abs(y - t), 1);
        return reduction == Reduction::mean ? mean(a) : sum(a);
      };
      compare(
          group, rows, absolute,
          [&](DistributedDataParallel& ddp, const Tensor& x, const Tensor& t) {
            return ddp.loss(absolute, reduction, x, t);
          },
          "a function");
    }
  }
  // Log-probabilities, with weights that the labels choose.
  const nn::NLLLoss nll({.weight = tensor({1.0, 2.0, 0.5, 3.0}, {.dtype = float64}), .ignore_index = 2});
  compare(
      group, 7, [&](const Tensor& y, const Tensor& t) { return nll(log_softmax(y, 1), labels(t.size(0), 4, 1)); },
      [&](DistributedDataParallel& ddp, const Tensor& x, const Tensor& t) {
        (void)t;
        struct OnLogits : nn::Loss {
          explicit OnLogits(const nn::NLLLoss& l) : Loss(Reduction::mean), inner(l) {}
          Tensor operator()(const Tensor& y, const Tensor& c) const override { return inner(log_softmax(y, 1), c); }
          LossParts parts(const Tensor& y, const Tensor& c) const override { return inner.parts(log_softmax(y, 1), c); }
          const nn::NLLLoss& inner;
        } const after_forward(nll);  // does not tell its normaliser before the forward
        return ddp.loss(after_forward, x, part(labels(7, 4, 1), group));
      },
      "nll");
}

void normalizers(const Group&) {
  const Tensor y = tensor({0, 1, 2, 1, 3});
  const Tensor logits = wave({5, 4}, 1), weight = tensor({1.0, 0.5, 2.0, 4.0}, {.dtype = float64});
  const nn::CrossEntropyLoss cross({.weight = weight, .ignore_index = 1}), plain;
  const nn::NLLLoss nll({.weight = weight});
  for (const nn::Loss* loss : std::initializer_list<const nn::Loss*>{&cross, &plain, &nll})
    require_close(loss->normalizer(y), loss->parts(logits, y).normalizer, 1e-12, "a normaliser");
  require(nn::MSELoss().normalizer(logits).item<double>() == 20, "a normaliser of mse");
  require_error({"label 9 at row 0 is out of range"}, [&] {
    (void)cross.normalizer(tensor({9, 0, 0, 0, 0}));
    (void)cross.parts(logits, tensor({9, 0, 0, 0, 0}));
  });
}

void no_sync_and_evaluation(const Group& group) {
  const auto alone = make_mlp(), net = make_mlp();
  DistributedDataParallel ddp(net, {.process_group = group});
  const nn::CrossEntropyLoss loss_fn;
  for (int step = 0; step < 2; ++step) {
    const Tensor x = wave({7, 6}, step), y = labels(7, 4, step);
    loss_fn((*alone)(x), y).backward();
    if (step == 0) {
      const auto guard = ddp.no_sync();
      ddp.loss(loss_fn, part(x, group), part(y, group)).backward();
    } else {
      ddp.loss(loss_fn, part(x, group), part(y, group)).backward();
    }
    const NoGradGuard no_grad;
    const Tensor value = ddp.loss(loss_fn, part(x, group), part(y, group));
    require(!value.requires_grad(), "under NoGradGuard nothing is recorded");
    require_close(average(value, group), loss_fn((*alone)(x), y), 1e-12, "the value under NoGradGuard");
  }
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    require_close(net->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-12,
                  "two batches, one of them no_sync");
}

void errors_of_loss(const Group& group) {
  DistributedDataParallel ddp(make_mlp(), {.process_group = group});
  const Tensor x = wave({2, 6}, 0), y = labels(2, 4, 0);
  require_error({"[DistributedDataParallel] loss needs one number", "Reduction::none"},
                [&] { ddp.loss(nn::CrossEntropyLoss({.reduction = Reduction::none}), x, y); });
  const auto rows = [](const Tensor& a, const Tensor&) { return sum(a, 1); };
  require_error({"the loss function gave a tensor of shape", "one number"},
                [&] { ddp.loss(rows, Reduction::mean, x, y); });
  require_error({"the target is a single number"}, [&] { ddp.loss(rows, Reduction::mean, x, ones({})); });
}

// Another criterion, or another option of it, on one rank alone is named on all, and the next loss works. Those of sums
// are not compared.
void different_criteria(const Group& group) {
  if (group->size() == 1) return;
  const auto net = make_mlp();
  DistributedDataParallel ddp(net, {.process_group = group});
  const Tensor x = wave({3, 6}, group->rank()), y = wave({3, 4}, 1), classes = labels(3, 4, 0);
  const bool odd = group->rank() == group->size() - 1;
  const Tensor weight = tensor({1.0, 2.0, 0.5, 3.0}, {.dtype = float64});
  const nn::CrossEntropyLoss usual, weighted({.weight = weight}), ignoring({.ignore_index = 2}),
      smooth({.label_smoothing = 0.25}), summed({.reduction = Reduction::sum});
  const nn::MSELoss mse, summed_mse({.reduction = Reduction::sum});
  auto train = [&](const nn::Loss& criterion, const Tensor& target) {
    net->zero_grad();
    ddp.loss(criterion, x, target).backward();
  };
  auto differ = [&](const nn::Loss& other, const Tensor& target) {
    require_error({fmt::format("rank {} of {}: the ranks differ: rank 0 has loss: {}, where rank {} has loss: {}; call "
                               "loss with the same criterion and options on every rank",
                               group->rank(), group->size(), usual.str(), group->size() - 1, other.str())},
                  [&] { odd ? train(other, target) : train(usual, classes); });
  };
  for (const nn::Loss* other : std::initializer_list<const nn::Loss*>{&weighted, &ignoring, &smooth})
    differ(*other, classes);
  differ(mse, y);
  train(usual, classes);
  train(mse, y);
  differ(mse, y);
  const auto function = [](const Tensor& a, const Tensor&) { return sum(a); };
  require_error({usual.str(), "a function (reduction=mean)"}, [&] {
    net->zero_grad();
    (odd ? ddp.loss(function, Reduction::mean, x, y) : ddp.loss(usual, x, classes)).backward();
  });
  train(usual, classes);
  require_error({"the ranks disagree", "(part of loss of a DistributedDataParallel, which every rank must call)"},
                [&] { odd ? train(summed, classes) : train(usual, classes); });
  train(usual, classes);
  odd ? train(summed_mse, y) : train(summed, classes);
}

// So that one rank may evaluate, or end its part of a join by an error, and the others need not know its criterion.
void sums_communicate_nothing(const Group& group) {
  DistributedDataParallel ddp(make_mlp(), {.process_group = group});
  const nn::CrossEntropyLoss mean, summed({.reduction = Reduction::sum});
  const Tensor x = wave({3, 6}, 1), y = labels(3, 4, 0);
  ddp.loss(mean, x, y).backward();
  const std::uint64_t before = group->call_count();
  for (int batch = 0; batch < group->rank(); ++batch) {
    const NoGradGuard no_grad;
    ddp.loss(summed, x, y);
  }
  require(group->call_count() == before, "no collective");
  ddp.loss(summed, x, y).backward();
  ddp.loss(mean, x, y).backward();
}

// Ended ranks take part in the comparison, and their criterion does not count.
void different_criteria_in_a_join(const Group& group) {
  if (group->size() < 3) return;
  DistributedDataParallel ddp(make_mlp(), {.process_group = group});
  const Tensor x = wave({3, 6}, 1), y = labels(3, 4, 0);
  for (const Reduction reduction : {Reduction::mean, Reduction::sum}) {
    const nn::CrossEntropyLoss criterion({.reduction = reduction}), other({.ignore_index = 1, .reduction = reduction});
    auto train = [&](bool differs) {
      for (int step = 0; step < 3 * group->rank(); ++step)  // none on rank 0
        ddp.loss(differs && group->rank() == 2 ? other : criterion, x, y).backward();
    };
    ddp.join([&] { train(false); });
    ddp.loss(criterion, x, y).backward();
    if (reduction == Reduction::mean)
      require_error({"rank 1 has loss: CrossEntropyLoss", "rank 2 has loss: CrossEntropyLoss", "ignore_index=1"},
                    [&] { ddp.join([&] { train(true); }); });
  }
}

}  // namespace

std::vector<DdpCase> loss_cases() {
  return {{"reductions", reductions},
          {"normalizers", normalizers},
          {"different criteria", different_criteria},
          {"sums communicate nothing", sums_communicate_nothing},
          {"different criteria in a join", different_criteria_in_a_join},
          {"no_sync and evaluation", no_sync_and_evaluation},
          {"errors of loss", errors_of_loss}};
}

}  // namespace tandem::test
