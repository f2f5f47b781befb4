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

void errors(const Group& group) {
  DistributedDataParallel ddp(make_mlp(), {.process_group = group});
  const Tensor x = wave({2, 6}, 0), y = labels(2, 4, 0);
  require_error({"[DistributedDataParallel] loss needs one number", "Reduction::none"},
                [&] { ddp.loss(nn::CrossEntropyLoss({.reduction = Reduction::none}), x, y); });
  const auto rows = [](const Tensor& a, const Tensor&) { return sum(a, 1); };
  require_error({"the loss function gave a tensor of shape", "one number"},
                [&] { ddp.loss(rows, Reduction::mean, x, y); });
  require_error({"the target is a single number"}, [&] { ddp.loss(rows, Reduction::mean, x, ones({})); });
}

}  // namespace

std::vector<DdpCase> loss_cases() {
  return {{"reductions", reductions},
          {"normalizers", normalizers},
          {"no_sync and evaluation", no_sync_and_evaluation},
          {"errors of loss", errors}};
}

}  // namespace tandem::test
