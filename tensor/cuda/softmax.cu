// Softmax and cross entropy over rows, a team a row.
#include <cmath>
#include <limits>

#include <tandem/tensor/cuda/device_error.h>
#include <tandem/tensor/cuda/kernels.h>
#include <tandem/tensor/dispatch.h>

namespace tandem::cuda {
namespace {

template <class T>
TANDEM_DEVICE T row_max(const Team& team, std::int64_t k, const T* x) {
  return team.reduce(k, x[0], Max(), [&](std::int64_t j) { return x[j]; });
}

// log(sum(exp(x))), shifted by the largest so that nothing overflows; NaN where the largest is infinite.
template <class T>
TANDEM_DEVICE T log_sum_exp(const Team& team, std::int64_t k, const T* x) {
  const T m = row_max(team, k, x);
  if (m == -std::numeric_limits<T>::infinity()) return m;
  return m + std::log(team.reduce(k, T(0), Sum(), [&](std::int64_t j) { return std::exp(x[j] - m); }));
}

template <class T>
struct Softmax {
  std::int64_t k;
  const T* x;
  T* y;
  bool log;
  TANDEM_DEVICE void operator()(const Team& team, std::int64_t r) const {
    const T* xr = x + r * k;
    T* yr = y + r * k;
    if (log) {
      const T lse = log_sum_exp(team, k, xr);
      return team.loop(k, [&](std::int64_t j) { yr[j] = xr[j] - lse; });
    }
    const T m = row_max(team, k, xr);
    const T sum = team.reduce(k, T(0), Sum(), [&](std::int64_t j) { return std::exp(xr[j] - m); });
    team.loop(k, [&](std::int64_t j) { yr[j] = std::exp(xr[j] - m) / sum; });
  }
};

template <class T>
struct SoftmaxGrad {
  std::int64_t k;
  const T *g, *y;
  T* dx;
  bool log;
  TANDEM_DEVICE void operator()(const Team& team, std::int64_t r) const {
    const T *gr = g + r * k, *yr = y + r * k;
    T* dr = dx + r * k;
    const T sum = team.reduce(k, T(0), Sum(), [&](std::int64_t j) { return log ? gr[j] : gr[j] * yr[j]; });
    team.loop(k, [&](std::int64_t j) { dr[j] = log ? gr[j] - std::exp(yr[j]) * sum : yr[j] * (gr[j] - sum); });
  }
};

// What both directions of cross entropy read.
template <class T>
struct Rows {
  std::int64_t k;
  const T* logits;
  const std::int64_t* labels;
  const T* class_weights;  // null: all ones
  T* log_sum_exp;
  T smoothing;
  RangeCheck range;
  TANDEM_DEVICE T weight(std::int64_t j) const { return class_weights != nullptr ? class_weights[j] : T(1); }
};

template <class T>
Rows<T> rows_of(const CrossEntropyArgs& args) {
  const std::int64_t classes = args.logits.shape[1];
  return {classes,
          args.logits.ptr<const T>(),
          args.labels.ptr<const std::int64_t>(),
          args.class_weights.ptr<const T>(),
          args.log_sum_exp.ptr<T>(),
          static_cast<T>(args.label_smoothing),
          {RangeUser::cross_entropy, classes, args.ignore_index}};
}

template <class T>
struct CrossEntropy {
  Rows<T> of;
  T *losses, *weights;
  DeviceError* error;
  TANDEM_DEVICE void operator()(const Team& team, std::int64_t r) const {
    const std::int64_t label = of.labels[r];
    if (label == of.range.ignored || !of.range.good(label)) {
      team.once([&] {
        const bool good = of.range.good(label);
        losses[r] = good ? T(0) : std::numeric_limits<T>::quiet_NaN();
        weights[r] = of.log_sum_exp[r] = T(0);
        if (!good) note_error(error, of.range, label, r);
      });
      return;
    }
    const T* x = of.logits + r * of.k;
    const T lse = log_sum_exp(team, of.k, x);
    T spread = 0;
    if (of.smoothing != T(0))
      spread = team.reduce(of.k, T(0), Sum(), [&](std::int64_t j) { return of.weight(j) * (lse - x[j]); });
    team.once([&] {
      const T weight = of.weight(label);
      T loss = (T(1) - of.smoothing) * weight * (lse - x[label]);
      if (of.smoothing != T(0)) loss += of.smoothing / static_cast<T>(of.k) * spread;
      losses[r] = loss;
      weights[r] = weight;
      of.log_sum_exp[r] = lse;
    });
  }
};

// A row whose label is out of range has gradient 0, like one that is ignored: its error is on its way to the host.
template <class T>
struct CrossEntropyGrad {
  Rows<T> of;
  const T* g;
  std::int64_t g_stride;
  T* dx;
  TANDEM_DEVICE void operator()(const Team& team, std::int64_t r) const {
    const std::int64_t label = of.labels[r];
    const T* x = of.logits + r * of.k;
    T* d = dx + r * of.k;
    if (label == of.range.ignored || !of.range.good(label))
      return team.loop(of.k, [&](std::int64_t j) { d[j] = T(0); });
    T all_weights = static_cast<T>(of.k);
    if (of.class_weights != nullptr && of.smoothing != T(0))
      all_weights = team.reduce(of.k, T(0), Sum(), [&](std::int64_t j) { return of.class_weights[j]; });
    const T gr = g[r * g_stride], lse = of.log_sum_exp[r];
    const T own = (T(1) - of.smoothing) * of.weight(label), each = of.smoothing / static_cast<T>(of.k);
    const T scale = gr * (own + each * all_weights);
    team.loop(of.k, [&](std::int64_t j) {
      T value = scale * std::exp(x[j] - lse);
      if (j == label) value -= gr * own;
      if (of.smoothing != T(0)) value -= gr * each * of.weight(j);
      d[j] = value;
    });
  }
};

// Of all rows, in one team.
template <class T>
struct MeanOfRows {
  std::int64_t rows;
  const T *losses, *weights;
  T *mean, *scale;
  TANDEM_DEVICE void operator()(const Team& team, std::int64_t) const {
    const auto total =
        static_cast<T>(team.reduce(rows, 0.0, Sum(), [&](std::int64_t r) { return static_cast<double>(losses[r]); }));
    const auto normalizer =
        static_cast<T>(team.reduce(rows, 0.0, Sum(), [&](std::int64_t r) { return static_cast<double>(weights[r]); }));
    team.once([&] {
      const T factor = normalizer == T(0) ? T(0) : static_cast<T>(1.0 / static_cast<double>(normalizer));
      *scale = factor;
      *mean = total * factor;
    });
  }
};

}  // namespace

void softmax(bool log, const View& x, const View& y) {
  if (x.numel() == 0) return;
  const cudaStream_t stream = use(y.device);
  dispatch_real("softmax", x.dtype, [&]<class T>() {
    for_each_team(stream, x.shape[0], Softmax<T>{x.shape[1], x.ptr<const T>(), y.ptr<T>(), log});
  });
}

void softmax_grad(bool log, const View& g, const View& y, const View& dx) {
  if (g.numel() == 0) return;
  const cudaStream_t stream = use(dx.device);
  dispatch_real("softmax", g.dtype, [&]<class T>() {
    const SoftmaxGrad<T> body{g.shape[1], g.ptr<const T>(), y.ptr<const T>(), dx.ptr<T>(), log};
    for_each_team(stream, g.shape[0], body);
  });
}

void cross_entropy(const CrossEntropyArgs& args, const View& losses, const View& weights) {
  if (args.logits.numel() == 0) return;
  const cudaStream_t stream = use(losses.device);
  dispatch_real("cross_entropy", args.logits.dtype, [&]<class T>() {
    const CrossEntropy<T> body{rows_of<T>(args), losses.ptr<T>(), weights.ptr<T>(), device_error(losses.device)};
    for_each_team(stream, args.logits.shape[0], body);
  });
}

void cross_entropy_grad(const CrossEntropyArgs& args, const View& g, const View& dx) {
  if (args.logits.numel() == 0) return;
  const cudaStream_t stream = use(dx.device);
  dispatch_real("cross_entropy", args.logits.dtype, [&]<class T>() {
    const CrossEntropyGrad<T> body{rows_of<T>(args), g.ptr<const T>(), g.strides[0], dx.ptr<T>()};
    for_each_team(stream, args.logits.shape[0], body);
  });
}

void mean_of_rows(const View& losses, const View& weights, const View& mean, const View& scale) {
  constexpr std::int64_t kFewRows = 16'384;
  const cudaStream_t stream = use(mean.device);
  View l = losses, w = weights;
  if (losses.numel() > kFewRows || !losses.contiguous() || !weights.contiguous()) {
    reduce(ReduceKind::sum, losses, mean);
    reduce(ReduceKind::sum, weights, scale);
    l = mean;
    w = scale;
  }
  dispatch_real("mean_of_rows", mean.dtype, [&]<class T>() {
    const MeanOfRows<T> body{l.numel(), l.ptr<const T>(), w.ptr<const T>(), mean.ptr<T>(), scale.ptr<T>()};
    for_each_team(stream, 1, body);
  });
}

}  // namespace tandem::cuda
