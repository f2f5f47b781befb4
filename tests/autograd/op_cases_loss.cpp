// Rows of softmax, the losses, joining, indexing and dropout.
#include <tandem/tests/autograd/op_cases.h>

#include <cmath>

#include <tandem/tensor/random.h>

namespace tandem::test {
namespace {

using Indices = std::vector<int64_t>;

Tensor labels_on(const Indices& labels, const Tensor& like) {
  return from_span(std::span<const int64_t>(labels), {.device = like.device()});
}

OpCase softmax_case(const char* name, bool log) {
  return {name, [=](Sizes& s) {
            const Shape shape = s.shape(0, 3);
            const int64_t dim = shape.dim() == 0 ? 0 : s.between(-shape.dim(), shape.dim() - 1);
            const std::size_t d = static_cast<std::size_t>(dim < 0 ? dim + shape.dim() : dim);
            return Example{{{shape}},
                           [=](const auto& in) { return log ? log_softmax(in[0], dim) : softmax(in[0], dim); },
                           [=](const auto& in) {
                             Array y(shape);
                             for_each_index(shape, [&](const auto& index) {
                               double sum = 0;
                               auto other = index;
                               for (int64_t j = 0; j < (shape.dim() == 0 ? 1 : shape[static_cast<int>(d)]); ++j) {
                                 if (shape.dim() > 0) other[d] = j;
                                 sum += std::exp(in[0].at(other));
                               }
                               y.at(index) = log ? in[0].at(index) - std::log(sum) : std::exp(in[0].at(index)) / sum;
                             });
                             return y;
                           }};
          }};
}

struct LossSetting {
  int64_t rows, classes;
  Indices labels;  // some of them ignored
  std::vector<double> weight;
  double smoothing;
  Reduction reduction;
};
constexpr int64_t kIgnored = -7;

LossSetting draw_loss(Sizes& s) {
  LossSetting loss{s.size(), s.positive(), {}, {}, s.flip() ? 0.25 : 0.0, static_cast<Reduction>(s.between(0, 2))};
  for (int64_t r = 0; r < loss.rows; ++r)
    loss.labels.push_back(s.between(0, 4) == 0 ? kIgnored : s.between(0, loss.classes - 1));
  if (s.flip())
    for (int64_t c = 0; c < loss.classes; ++c) loss.weight.push_back(s.real(0.2, 2));
  return loss;
}

// By the definition, from log-probabilities.
Array naive_nll(const LossSetting& loss, const Array& log_p) {
  Array rows({loss.rows});
  double normalizer = 0;
  for (int64_t r = 0; r < loss.rows; ++r) {
    const int64_t label = loss.labels[static_cast<std::size_t>(r)];
    if (label == kIgnored) continue;
    auto weight = [&](int64_t c) { return loss.weight.empty() ? 1.0 : loss.weight[static_cast<std::size_t>(c)]; };
    normalizer += weight(label);
    double spread = 0;
    for (int64_t c = 0; c < loss.classes; ++c) spread -= weight(c) * log_p.at({r, c});
    rows.at({r}) = -(1 - loss.smoothing) * weight(label) * log_p.at({r, label}) +
                   loss.smoothing / static_cast<double>(loss.classes) * spread;
  }
  if (loss.reduction == Reduction::none) return rows;
  Array y((Shape()));
  for (const double v : rows.values) y.values[0] += v;
  if (loss.reduction == Reduction::mean) y.values[0] = normalizer == 0 ? 0 : y.values[0] / normalizer;
  return y;
}

Array naive_log_softmax(const Array& x) {
  Array y(x.shape);
  for (int64_t r = 0; r < x.shape[0]; ++r) {
    double sum = 0;
    for (int64_t c = 0; c < x.shape[1]; ++c) sum += std::exp(x.at({r, c}));
    for (int64_t c = 0; c < x.shape[1]; ++c) y.at({r, c}) = x.at({r, c}) - std::log(sum);
  }
  return y;
}

Tensor weight_on(const LossSetting& loss, const Tensor& like) {
  return loss.weight.empty() ? Tensor() : from_values(loss.weight, {loss.classes}, like.device()).to(like.dtype());
}

// The parts as one tensor: their quotient, which is the mean.
Tensor quotient(const LossParts& parts) { return parts.sum / clamp(parts.normalizer, 1e-30, 1e30); }

OpCase cross_entropy_case(bool parts) {
  return {parts ? "cross_entropy_parts" : "cross_entropy", [=](Sizes& s) {
            LossSetting loss = draw_loss(s);
            if (parts) loss.reduction = Reduction::mean;
            return Example{{{{loss.rows, loss.classes}}},
                           [=](const auto& in) {
                             const CrossEntropyOptions options{.weight = weight_on(loss, in[0]),
                                                               .ignore_index = kIgnored,
                                                               .reduction = loss.reduction,
                                                               .label_smoothing = loss.smoothing};
                             const Tensor labels = labels_on(loss.labels, in[0]);
                             return parts ? quotient(cross_entropy_parts(in[0], labels, options))
                                          : cross_entropy(in[0], labels, options);
                           },
                           [=](const auto& in) { return naive_nll(loss, naive_log_softmax(in[0])); }};
          }};
}

OpCase nll_case(bool parts) {
  return {parts ? "nll_loss_parts" : "nll_loss", [=](Sizes& s) {
            LossSetting loss = draw_loss(s);
            loss.smoothing = 0;
            if (parts) loss.reduction = Reduction::mean;
            return Example{
                {{{loss.rows, loss.classes}, -3, -0.1}},
                [=](const auto& in) {
                  const NLLOptions options{
                      .weight = weight_on(loss, in[0]), .ignore_index = kIgnored, .reduction = loss.reduction};
                  const Tensor labels = labels_on(loss.labels, in[0]);
                  return parts ? quotient(nll_loss_parts(in[0], labels, options)) : nll_loss(in[0], labels, options);
                },
                [=](const auto& in) { return naive_nll(loss, in[0]); }};
          }};
}

OpCase mse_case(bool parts) {
  return {parts ? "mse_loss_parts" : "mse_loss", [=](Sizes& s) {
            const Shape shape = s.shape(0, 3);
            const auto reduction = parts ? Reduction::mean : static_cast<Reduction>(s.between(0, 2));
            return Example{{{shape}, {shape}},
                           [=](const auto& in) {
                             return parts ? quotient(mse_loss_parts(in[0], in[1])) : mse_loss(in[0], in[1], reduction);
                           },
                           [=](const auto& in) {
                             Array y(shape), one((Shape()));
                             for (std::size_t i = 0; i < y.values.size(); ++i) {
                               y.values[i] = (in[0].values[i] - in[1].values[i]) * (in[0].values[i] - in[1].values[i]);
                               one.values[0] += y.values[i];
                             }
                             if (reduction == Reduction::none) return y;
                             if (reduction == Reduction::mean && !y.values.empty())
                               one.values[0] /= static_cast<double>(y.values.size());
                             return one;
                           }};
          }};
}

// Parts along `dim` written side by side.
OpCase join_case(const char* name, bool stacked) {
  return {name, [=](Sizes& s) {
            Shape shape = s.shape(stacked ? 0 : 1, 3);
            const int64_t dim =
                stacked ? s.between(-shape.dim() - 1, shape.dim()) : s.between(-shape.dim(), shape.dim() - 1);
            const int d = static_cast<int>(dim < 0 ? dim + shape.dim() + (stacked ? 1 : 0) : dim);
            std::vector<Argument> arguments;
            int64_t joined = 0;
            for (int64_t n = s.between(1, 3); n > 0; --n) {
              if (!stacked) shape[d] = s.size();
              joined += stacked ? 1 : shape[d];
              arguments.push_back({shape});
            }
            // A vector without elements counts for nothing beside parts with more dimensions.
            if (!stacked && shape.dim() > 1 && s.flip()) arguments.push_back({{0}});
            Shape result = shape;
            if (stacked)
              result.insert(d, joined);
            else
              result[d] = joined;
            return Example{arguments, [=](const auto& in) { return stacked ? stack(in, dim) : cat(in, dim); },
                           [=](const auto& in) {
                             Array y(result);
                             int64_t start = 0;
                             for (const Array& part : in) {
                               if (!stacked && part.shape == Shape{0} && result.dim() > 1) continue;
                               for_each_index(part.shape, [&](std::vector<int64_t> index) {
                                 const double v = part.at(index);
                                 if (stacked)
                                   index.insert(index.begin() + d, start);
                                 else
                                   index[static_cast<std::size_t>(d)] += start;
                                 y.at(index) = v;
                               });
                               start += stacked ? 1 : part.shape[d];
                             }
                             return y;
                           }};
          }};
}

OpCase index_select_case() {
  return {"index_select", [](Sizes& s) {
            Shape shape = s.shape(1, 3);
            const int d = static_cast<int>(s.between(0, shape.dim() - 1));
            shape[d] = s.positive();
            Indices index;
            for (int64_t n = s.between(0, 5); n > 0; --n) index.push_back(s.between(0, shape[d] - 1));
            Shape result = shape;
            result[d] = static_cast<int64_t>(index.size());
            return Example{{{shape}},
                           [=](const auto& in) { return index_select(in[0], d, labels_on(index, in[0])); },
                           [=](const auto& in) {
                             Array y(result);
                             for_each_index(result, [&](std::vector<int64_t> i) {
                               auto from = i;
                               from[static_cast<std::size_t>(d)] =
                                   index[static_cast<std::size_t>(i[static_cast<std::size_t>(d)])];
                               y.at(i) = in[0].at(from);
                             });
                             return y;
                           }};
          }};
}

OpCase gather_case() {
  return {"gather", [](Sizes& s) {
            Shape shape = s.shape(0, 3), picked = shape;
            const int d = shape.dim() == 0 ? 0 : static_cast<int>(s.between(0, shape.dim() - 1));
            if (shape.dim() > 0) {
              shape[d] = s.positive();
              for (int i = 0; i < shape.dim(); ++i) picked[i] = s.between(0, i == d ? 5 : shape[i]);
            }
            Indices index;
            for (int64_t n = picked.numel(); n > 0; --n)
              index.push_back(shape.dim() == 0 ? 0 : s.between(0, shape[d] - 1));
            return Example{{{shape}},
                           [=](const auto& in) { return gather(in[0], d, labels_on(index, in[0]).view(picked)); },
                           [=](const auto& in) {
                             Array y(picked);
                             for_each_index(picked, [&](std::vector<int64_t> i) {
                               auto from = i;
                               if (!from.empty()) from[static_cast<std::size_t>(d)] = index[y.place(i)];
                               y.at(i) = in[0].at(from);
                             });
                             return y;
                           }};
          }};
}

// The mask repeats with the seed; the reference takes it from a dropout of ones, which other tests look at.
OpCase dropout_case() {
  return {"dropout", [](Sizes& s) {
            const Shape shape = s.shape(0, 3);
            const double p = s.flip() ? 0.5 : 0.25;
            const auto seed = static_cast<std::uint64_t>(s.between(0, 1000));
            auto drop = [=](const Tensor& x) {
              manual_seed(seed);
              return dropout(x.to(float64), p, true).to(x.dtype());
            };
            return Example{{{shape}},
                           [=](const auto& in) { return drop(in[0]); },
                           [=](const auto& in) {
                             Array y = in[0];
                             const auto mask = drop(ones(shape, {.dtype = float64})).template to_vector<double>();
                             for (std::size_t i = 0; i < mask.size(); ++i) y.values[i] *= mask[i];
                             return y;
                           }};
          }};
}

}  // namespace

std::vector<OpCase> loss_and_index_cases() {
  return {softmax_case("softmax", false),
          softmax_case("log_softmax", true),
          cross_entropy_case(false),
          cross_entropy_case(true),
          nll_case(false),
          nll_case(true),
          mse_case(false),
          mse_case(true),
          join_case("cat", false),
          join_case("stack", true),
          index_select_case(),
          gather_case(),
          dropout_case()};
}

}  // namespace tandem::test
