// Softmax and the losses.
#include <tandem/autograd/functions/helpers.h>

namespace tandem {
namespace {

using autograd::empty_beside;
using autograd::Gradients;
using autograd::needs_grad;
using autograd::record;
using autograd::Saved;

Tensor softmax_last(bool log, const Tensor& x) {
  const char* name = log ? "log_softmax" : "softmax";
  const Tensor rows = x.contiguous().view({-1, x.size(-1)});
  Tensor y = empty_beside(x, rows.shape(), x.dtype());
  const Backend& table = backend(x.device());
  kernel(name, table, table.softmax)(log, rows.raw(), y.raw_for_write());
  if (needs_grad(rows))
    record(name, {&rows}, y, [log, name, sy = Saved(y)](Gradients& g) {
      Tensor dx = g.memory_for(0);
      backend(dx.device()).softmax_grad(log, g[0].contiguous().raw(), sy.get(name).raw(), dx.raw_for_write());
      g.set(0, std::move(dx));
    });
  return y.view(x.shape());
}

Tensor softmax_along(bool log, const Tensor& x, int64_t dim) {
  const char* name = log ? "log_softmax" : "softmax";
  autograd::check_real(name, x);
  const int d = wrap_dim(name, dim, x.dim());
  if (x.numel() == 0) return x.clone();
  if (x.dim() == 0) return softmax_last(log, x.view({1})).view({});
  if (d == x.dim() - 1) return softmax_last(log, x);
  return softmax_last(log, x.transpose(d, -1)).transpose(d, -1);
}

void check_labels(const char* op, const Tensor& logits, const Tensor& labels, const Tensor& weight) {
  common_device(op, {&logits, &labels, &weight});
  autograd::check_real(op, logits);
  check(logits.dim() == 2, op, "the first argument must be {{rows, classes}}, but it is {}", logits.shape());
  check(labels.dim() == 1 && labels.size(0) == logits.size(0), op,
        "needs one label a row: the first argument is {}, the labels are {}", logits.shape(), labels.shape());
  check(labels.dtype() == int64, op, "the labels are {}; they must be int64 class numbers: convert with .to(int64)",
        labels.dtype());
  if (weight.defined())
    check(weight.dim() == 1 && weight.size(0) == logits.size(1) && weight.dtype() == logits.dtype(), op,
          "needs one {} weight a class, {}: weight is {} {}", logits.dtype(), logits.size(1), weight.dtype(),
          weight.shape());
}

// The losses of the rows, and what each adds to the normaliser.
struct RowLosses {
  Tensor losses, weights;
};

RowLosses cross_entropy_rows(const Tensor& input, const Tensor& labels, const CrossEntropyOptions& options) {
  check_labels("cross_entropy", input, labels, options.weight);
  check(options.label_smoothing >= 0 && options.label_smoothing <= 1, "cross_entropy",
        "label_smoothing is {}; it must lie in 0..1", options.label_smoothing);
  const Tensor logits = input.contiguous();
  const int64_t rows = logits.size(0);
  check(rows == 0 || logits.size(1) > 0, "cross_entropy", "the logits {} have no classes", logits.shape());
  struct Kept {
    Saved logits, labels, weight, log_sum_exp;
    int64_t ignore_index;
    double label_smoothing;
    CrossEntropyArgs args() const {
      CrossEntropyArgs a;
      a.logits = logits.get("cross_entropy").raw();
      a.labels = labels.get("cross_entropy").raw();
      if (weight.defined()) a.class_weights = weight.get("cross_entropy").raw();
      a.log_sum_exp = log_sum_exp.get("cross_entropy").raw();
      a.ignore_index = ignore_index;
      a.label_smoothing = label_smoothing;
      return a;
    }
  };
  const Tensor lse = empty_beside(logits, {rows}, logits.dtype());
  const Kept kept{Saved(logits),
                  Saved(labels.contiguous()),
                  Saved(options.weight.defined() ? options.weight.contiguous() : Tensor()),
                  Saved(lse),
                  options.ignore_index,
                  options.label_smoothing};
  RowLosses y{empty_beside(logits, {rows}, logits.dtype()), empty_beside(logits, {rows}, logits.dtype())};
  const Backend& table = backend(logits.device());
  kernel("cross_entropy", table, table.cross_entropy)(kept.args(), y.losses.raw_for_write(), y.weights.raw_for_write());
  if (needs_grad(logits))
    record("cross_entropy", {&logits}, y.losses, [kept](Gradients& g) {
      Tensor dx = g.memory_for(0);
      backend(dx.device()).cross_entropy_grad(kept.args(), g[0].raw(), dx.raw_for_write());
      g.set(0, std::move(dx));
    });
  return y;
}

RowLosses nll_rows(const Tensor& log_probabilities, const Tensor& labels, const NLLOptions& options) {
  check_labels("nll_loss", log_probabilities, labels, options.weight);
  const Backend& table = backend(labels.device());
  const RangeCheck range{RangeUser::nll_loss, log_probabilities.size(1), options.ignore_index};
  kernel("nll_loss", table, table.check_range)(range, labels.raw());
  const Tensor kept = labels != options.ignore_index;
  const Tensor safe = where(kept, labels, zeros_like(labels));
  Tensor weights = kept.to(log_probabilities.dtype());
  if (options.weight.defined()) weights = weights * index_select(options.weight, 0, safe);
  if (labels.numel() == 0) return {sum(log_probabilities, 1), weights};
  const Tensor losses = -gather(log_probabilities, 1, safe.unsqueeze(1)).squeeze(1) * weights;
  return {where(kept, losses, zeros_like(losses)), weights};  // an infinity in an ignored row must not reach the sum
}

// The mean in one piece, and without the host, which would have to wait for a GPU to know the normaliser.
Tensor mean_of_rows(const RowLosses& rows) {
  const Tensor& losses = rows.losses;
  Tensor mean = empty_beside(losses, {1}, losses.dtype()), scale = empty_beside(losses, {1}, losses.dtype());
  const Backend& table = backend(losses.device());
  kernel("mean_of_rows", table, table.mean_of_rows)(losses.raw(), rows.weights.raw(), mean.raw_for_write(),
                                                    scale.raw_for_write());
  Tensor y = mean.view({});
  if (needs_grad(losses))
    record("mean_of_rows", {&losses}, y,
           [count = losses.size(0), scale](Gradients& g) { g.set(0, (g[0].view({1}) * scale).expand({count})); });
  return y;
}

Tensor finish(const RowLosses& rows, Reduction reduction) {
  if (reduction == Reduction::none) return rows.losses;
  return reduction == Reduction::sum ? sum(rows.losses) : mean_of_rows(rows);
}

}  // namespace

Tensor mean_of_parts(const Tensor& sum, const Tensor& normalizer) {
  const Tensor nothing = zeros_like(normalizer);
  return sum * where(normalizer == nothing, nothing, 1.0 / normalizer).to(sum.dtype());
}
Tensor mean_of_parts(const Tensor& sum, double normalizer) { return sum * (normalizer == 0 ? 0.0 : 1.0 / normalizer); }

Tensor softmax(const Tensor& x, int64_t dim) { return softmax_along(false, x, dim); }
Tensor log_softmax(const Tensor& x, int64_t dim) { return softmax_along(true, x, dim); }

Tensor cross_entropy(const Tensor& logits, const Tensor& labels, const CrossEntropyOptions& options) {
  return finish(cross_entropy_rows(logits, labels, options), options.reduction);
}
LossParts cross_entropy_parts(const Tensor& logits, const Tensor& labels, const CrossEntropyOptions& options) {
  const RowLosses rows = cross_entropy_rows(logits, labels, options);
  return {sum(rows.losses), sum(rows.weights)};
}

Tensor nll_loss(const Tensor& log_probabilities, const Tensor& labels, const NLLOptions& options) {
  return finish(nll_rows(log_probabilities, labels, options), options.reduction);
}
LossParts nll_loss_parts(const Tensor& log_probabilities, const Tensor& labels, const NLLOptions& options) {
  const RowLosses rows = nll_rows(log_probabilities, labels, options);
  return {sum(rows.losses), sum(rows.weights)};
}

Tensor mse_loss(const Tensor& x, const Tensor& target, Reduction reduction) {
  common_device("mse_loss", {&x, &target});
  check(x.shape() == target.shape(), "mse_loss", "the shapes differ: input is {}, target is {}", x.shape(),
        target.shape());
  const Tensor distance = x - target;
  Tensor squares = distance * distance;
  if (reduction == Reduction::none) return squares;
  Tensor total = sum(squares);
  return reduction == Reduction::sum ? total : total / static_cast<double>(std::max<int64_t>(1, x.numel()));
}
LossParts mse_loss_parts(const Tensor& x, const Tensor& target) {
  return {mse_loss(x, target, Reduction::sum),
          full({}, static_cast<double>(x.numel()), {.dtype = x.dtype(), .device = x.device()})};
}

}  // namespace tandem
