// One pass over memory for each optimizer step.
#include <tandem/tensor/cpu/kernels.h>
#include <tandem/tensor/cpu/loops.h>
#include <tandem/tensor/dispatch.h>
#include <tandem/tensor/optimizer_values.h>

namespace tandem::cpu {
namespace {

// Momentum: 0 none, 1 first step (the buffer becomes the gradient), 2 later steps.
template <class T, int Momentum, bool Nesterov>
TANDEM_CLONES void sgd_dense(std::int64_t n, SGDCoefficients<T> c, const T* g, T* b, T* p) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    T d = c.decayed(g[i], p[i]);
    if constexpr (Momentum != 0) d = c.through_momentum(d, b[i], Momentum == 1, Nesterov);
    p[i] -= c.lr * d;
  }
}

template <class T>
TANDEM_CLONES void sgd_plain(std::int64_t n, T lr, const T* g, T* p) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) p[i] -= lr * g[i];
}

template <class T, bool Amsgrad>
TANDEM_CLONES void adam_dense(std::int64_t n, AdamCoefficients<T> c, const T* g, T* m, T* v, T* vmax, T* p) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const T w = p[i] * c.shrink;
    T mi = m[i], vi = v[i];
    c.update_means(g[i], w, mi, vi);
    m[i] = mi;
    v[i] = vi;
    T scale = vi;
    if constexpr (Amsgrad) {
      scale = vmax[i] > vi ? vmax[i] : vi;
      vmax[i] = scale;
    }
    p[i] = c.moved(w, mi, scale);
  }
}

void sgd_one(const SGDArgs& args) {
  dispatch_real("SGD", args.parameter.dtype, [&]<class T>() {
    const auto c = SGDCoefficients<T>::of(args);
    const T* g = args.gradient.ptr<T>();
    T *b = args.momentum_buffer.ptr<T>(), *p = args.parameter.ptr<T>();
    parallel_for(args.parameter.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t n = end - begin;
      if (b == nullptr && args.weight_decay == 0)
        sgd_plain<T>(n, c.lr, g + begin, p + begin);
      else if (b == nullptr)
        sgd_dense<T, 0, false>(n, c, g + begin, nullptr, p + begin);
      else if (args.first_step && args.nesterov)
        sgd_dense<T, 1, true>(n, c, g + begin, b + begin, p + begin);
      else if (args.first_step)
        sgd_dense<T, 1, false>(n, c, g + begin, b + begin, p + begin);
      else if (args.nesterov)
        sgd_dense<T, 2, true>(n, c, g + begin, b + begin, p + begin);
      else
        sgd_dense<T, 2, false>(n, c, g + begin, b + begin, p + begin);
    });
  });
}

void adam_one(const AdamArgs& args) {
  dispatch_real("Adam", args.parameter.dtype, [&]<class T>() {
    const auto c = AdamCoefficients<T>::of(args);
    const T* g = args.gradient.ptr<T>();
    T *m = args.exp_avg.ptr<T>(), *v = args.exp_avg_sq.ptr<T>(), *vmax = args.max_exp_avg_sq.ptr<T>();
    T* p = args.parameter.ptr<T>();
    parallel_for(args.parameter.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t n = end - begin;
      if (vmax != nullptr)
        adam_dense<T, true>(n, c, g + begin, m + begin, v + begin, vmax + begin, p + begin);
      else
        adam_dense<T, false>(n, c, g + begin, m + begin, v + begin, nullptr, p + begin);
    });
  });
}

}  // namespace

void sgd_step(std::span<const SGDArgs> args, MakeReplay<SGDArgs>) {
  for (const SGDArgs& one : args) sgd_one(one);
}
void adam_step(std::span<const AdamArgs> args, MakeReplay<AdamArgs>) {
  for (const AdamArgs& one : args) adam_one(one);
}

}  // namespace tandem::cpu
