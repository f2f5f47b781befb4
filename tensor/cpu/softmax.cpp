// Softmax and cross entropy over rows.
#include <cmath>
#include <limits>

#include <tandem/tensor/cpu/kernels.h>
#include <tandem/tensor/cpu/loops.h>
#include <tandem/tensor/dispatch.h>

namespace tandem::cpu {
namespace {

template <class T>
T row_max(std::int64_t k, const T* x) {
  T m = x[0];
  for (std::int64_t j = 1; j < k; ++j) m = x[j] > m || x[j] != x[j] ? x[j] : m;
  return m;
}

// log(sum(exp(x))), shifted by the largest so that nothing overflows; NaN where the largest is infinite.
template <class T>
T log_sum_exp(std::int64_t k, const T* x) {
  const T m = row_max(k, x);
  if (m == -std::numeric_limits<T>::infinity()) return m;
  T sum = 0;
  for (std::int64_t j = 0; j < k; ++j) sum += std::exp(x[j] - m);
  return m + std::log(sum);
}

template <class Body>
void for_each_row(const View& x, const Body& body) {
  const std::int64_t k = x.shape[1];
  if (k == 0) return;
  parallel_for(x.shape[0], std::max<std::int64_t>(1, 4096 / k), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) body(r, k);
  });
}

}  // namespace

void softmax(bool log, const View& x, const View& y) {
  dispatch_real("softmax", x.dtype, [&]<class T>() {
    for_each_row(x, [&](std::int64_t r, std::int64_t k) {
      const T* xr = x.ptr<T>() + r * k;
      T* yr = y.ptr<T>() + r * k;
      if (log) {
        const T lse = log_sum_exp(k, xr);
        for (std::int64_t j = 0; j < k; ++j) yr[j] = xr[j] - lse;
        return;
      }
      const T m = row_max(k, xr);
      T sum = 0;
      for (std::int64_t j = 0; j < k; ++j) sum += yr[j] = std::exp(xr[j] - m);
      for (std::int64_t j = 0; j < k; ++j) yr[j] /= sum;
    });
  });
}

void softmax_grad(bool log, const View& g, const View& y, const View& dx) {
  dispatch_real("softmax", g.dtype, [&]<class T>() {
    for_each_row(g, [&](std::int64_t r, std::int64_t k) {
      const T *gr = g.ptr<T>() + r * k, *yr = y.ptr<T>() + r * k;
      T* dr = dx.ptr<T>() + r * k;
      T sum = 0;
      for (std::int64_t j = 0; j < k; ++j) sum += log ? gr[j] : gr[j] * yr[j];
      for (std::int64_t j = 0; j < k; ++j) dr[j] = log ? gr[j] - std::exp(yr[j]) * sum : yr[j] * (gr[j] - sum);
    });
  });
}

void cross_entropy(const CrossEntropyArgs& args, const View& losses, const View& weights) {
  const auto* labels = args.labels.ptr<const std::int64_t>();
  check_range({RangeUser::cross_entropy, args.logits.shape[1], args.ignore_index}, args.labels);
  dispatch_real("cross_entropy", args.logits.dtype, [&]<class T>() {
    const T* class_weights = args.class_weights.ptr<const T>();
    const T smoothing = static_cast<T>(args.label_smoothing);
    for_each_row(args.logits, [&](std::int64_t r, std::int64_t k) {
      const T* x = args.logits.ptr<T>() + r * k;
      T &loss = losses.ptr<T>()[r], &weight = weights.ptr<T>()[r], &lse = args.log_sum_exp.ptr<T>()[r];
      const std::int64_t label = labels[r];
      if (label == args.ignore_index) {
        loss = weight = lse = T(0);
        return;
      }
      lse = log_sum_exp(k, x);
      weight = class_weights ? class_weights[label] : T(1);
      loss = (T(1) - smoothing) * weight * (lse - x[label]);
      if (smoothing == T(0)) return;
      T spread = 0;
      for (std::int64_t j = 0; j < k; ++j) spread += (class_weights ? class_weights[j] : T(1)) * (lse - x[j]);
      loss += smoothing / static_cast<T>(k) * spread;
    });
  });
}

void cross_entropy_grad(const CrossEntropyArgs& args, const View& g, const View& dx) {
  dispatch_real("cross_entropy", args.logits.dtype, [&]<class T>() {
    const auto* labels = args.labels.ptr<const std::int64_t>();
    const T* class_weights = args.class_weights.ptr<const T>();
    const T smoothing = static_cast<T>(args.label_smoothing);
    T all_weights = static_cast<T>(args.logits.shape[1]);
    if (class_weights) {
      all_weights = 0;
      for (std::int64_t j = 0; j < args.logits.shape[1]; ++j) all_weights += class_weights[j];
    }
    for_each_row(args.logits, [&](std::int64_t r, std::int64_t k) {
      const T* x = args.logits.ptr<T>() + r * k;
      T* d = dx.ptr<T>() + r * k;
      const std::int64_t label = labels[r];
      if (label == args.ignore_index) {
        std::fill_n(d, k, T(0));
        return;
      }
      const T gr = g.ptr<T>()[r * g.strides[0]], lse = args.log_sum_exp.ptr<T>()[r];
      const T own = (T(1) - smoothing) * (class_weights ? class_weights[label] : T(1));
      const T each = smoothing / static_cast<T>(k);
      const T scale = gr * (own + each * all_weights);
      for (std::int64_t j = 0; j < k; ++j) d[j] = scale * std::exp(x[j] - lse);
      d[label] -= gr * own;
      if (smoothing != T(0))
        for (std::int64_t j = 0; j < k; ++j) d[j] -= gr * each * (class_weights ? class_weights[j] : T(1));
    });
  });
}

void mean_of_rows(const View& losses, const View& weights, const View& mean, const View& scale) {
  reduce(ReduceKind::sum, losses, mean);
  reduce(ReduceKind::sum, weights, scale);
  dispatch_real("mean_of_rows", mean.dtype, [&]<class T>() {
    T &total = *mean.ptr<T>(), &factor = *scale.ptr<T>();
    factor = factor == T(0) ? T(0) : static_cast<T>(1.0 / static_cast<double>(factor));
    total *= factor;
  });
}

}  // namespace tandem::cpu
