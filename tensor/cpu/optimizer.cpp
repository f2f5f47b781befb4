// One pass over memory for each optimizer step. Coefficients are computed in double and rounded once.
#include <cmath>

#include <tandem/tensor/cpu/kernels.h>
#include <tandem/tensor/cpu/loops.h>
#include <tandem/tensor/dispatch.h>

namespace tandem::cpu {
namespace {

template <class T>
struct SGDCoefficients {
  T lr, momentum, keep, weight_decay;  // keep = 1 - dampening
};

// Momentum: 0 none, 1 first step (the buffer becomes the gradient), 2 later steps.
template <class T, int Momentum, bool Nesterov>
TANDEM_CLONES void sgd_dense(std::int64_t n, SGDCoefficients<T> c, const T* g, T* b, T* p) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    T d = g[i] + c.weight_decay * p[i];
    if constexpr (Momentum != 0) {
      const T m = Momentum == 1 ? d : c.momentum * b[i] + c.keep * d;
      b[i] = m;
      d = Nesterov ? d + c.momentum * m : m;
    }
    p[i] -= c.lr * d;
  }
}

template <class T>
TANDEM_CLONES void sgd_plain(std::int64_t n, T lr, const T* g, T* p) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) p[i] -= lr * g[i];
}

template <class T>
struct AdamCoefficients {
  T beta1, beta2, rest1, rest2, step_size, inverse_correction2, eps, weight_decay, shrink;
};

template <class T, bool Amsgrad>
TANDEM_CLONES void adam_dense(std::int64_t n, AdamCoefficients<T> c, const T* g, T* m, T* v, T* vmax, T* p) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const T w = p[i] * c.shrink;
    const T d = g[i] + c.weight_decay * w;
    const T mi = c.beta1 * m[i] + c.rest1 * d;
    const T vi = c.beta2 * v[i] + c.rest2 * d * d;
    m[i] = mi;
    v[i] = vi;
    T scale = vi;
    if constexpr (Amsgrad) {
      scale = vmax[i] > vi ? vmax[i] : vi;
      vmax[i] = scale;
    }
    p[i] = w - c.step_size * mi / (std::sqrt(scale) * c.inverse_correction2 + c.eps);
  }
}

void sgd_one(const SGDArgs& args) {
  dispatch_real("SGD", args.parameter.dtype, [&]<class T>() {
    const SGDCoefficients<T> c{static_cast<T>(args.lr), static_cast<T>(args.momentum),
                               static_cast<T>(1.0 - args.dampening), static_cast<T>(args.weight_decay)};
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
    // The corrections in double: in float, 1 - beta2^t loses three digits.
    const double correction1 = 1.0 - std::pow(args.beta1, static_cast<double>(args.step));
    const double correction2 = 1.0 - std::pow(args.beta2, static_cast<double>(args.step));
    const AdamCoefficients<T> c{static_cast<T>(args.beta1),
                                static_cast<T>(args.beta2),
                                static_cast<T>(1.0 - args.beta1),
                                static_cast<T>(1.0 - args.beta2),
                                static_cast<T>(args.lr / correction1),
                                static_cast<T>(1.0 / std::sqrt(correction2)),
                                static_cast<T>(args.eps),
                                static_cast<T>(args.decoupled ? 0.0 : args.weight_decay),
                                static_cast<T>(args.decoupled ? 1.0 - args.lr * args.weight_decay : 1.0)};
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

void sgd_step(std::span<const SGDArgs> args) {
  for (const SGDArgs& one : args) sgd_one(one);
}
void adam_step(std::span<const AdamArgs> args) {
  for (const AdamArgs& one : args) adam_one(one);
}

}  // namespace tandem::cpu
