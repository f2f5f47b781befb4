// One pass over memory for each optimizer step. Coefficients are computed in double and rounded once.
#include <cmath>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <tandem/tensor/cpu/dispatch.h>
#include <tandem/tensor/cpu/kernels.h>
#include <tandem/tensor/cpu/loops.h>

namespace tandem::cpu {
namespace {

// Streaming stores write whole cache lines past the caches. Narrower ones than a line were measured to cost more than
// they gain, so they are used where the CPU has the wide ones.
constexpr std::uintptr_t kLine = 64;
#if defined(__x86_64__)
const bool kCanStream = __builtin_cpu_supports("avx512f");

// `lines` cache lines; both are aligned to them.
__attribute__((target("avx512f"))) void stream_lines(std::int64_t lines, const void* from, void* to) {
  const auto* source = static_cast<const __m512i*>(from);
  auto* target = static_cast<__m512i*>(to);
  for (std::int64_t i = 0; i < lines; ++i) _mm512_stream_si512(target + i, _mm512_load_si512(source + i));
  _mm_sfence();
}
#else
constexpr bool kCanStream = false;
void stream_lines(std::int64_t, const void*, void*) {}
#endif

// Calls update(at, m, to), which writes the new values of elements at .. at+m-1 of p to `to`: all at once in place, or
// block by block to be streamed out. Where several cores have read p, an ordinary store has to take its line from all
// of them; a streaming store does not.
template <class T, class Update>
void write_new(std::int64_t n, T* p, bool streaming, const Update& update) {
  constexpr std::int64_t kBlock = 1024, kPerLine = kLine / sizeof(T);
  std::int64_t at = 0;
  if (streaming && kCanStream && reinterpret_cast<std::uintptr_t>(p) % kLine == 0) {
    alignas(kLine) T block[kBlock];
    while (n - at >= kPerLine) {
      const std::int64_t m = (n - at < kBlock ? n - at : kBlock) / kPerLine * kPerLine;
      update(at, m, block);
      stream_lines(m / kPerLine, block, p + at);
      at += m;
    }
  }
  if (at < n) update(at, n - at, p + at);
}

template <class T>
struct SGDCoefficients {
  T lr, momentum, keep, weight_decay;  // keep = 1 - dampening
};

// Momentum: 0 none, 1 first step (the buffer becomes the gradient), 2 later steps.
template <class T, int Momentum, bool Nesterov>
TANDEM_CLONES void sgd_dense(std::int64_t n, SGDCoefficients<T> c, const T* g, T* b, const T* p, T* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    T d = g[i] + c.weight_decay * p[i];
    if constexpr (Momentum != 0) {
      const T m = Momentum == 1 ? d : c.momentum * b[i] + c.keep * d;
      b[i] = m;
      d = Nesterov ? d + c.momentum * m : m;
    }
    to[i] = p[i] - c.lr * d;
  }
}

template <class T>
TANDEM_CLONES void sgd_plain(std::int64_t n, T lr, const T* g, const T* p, T* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) to[i] = p[i] - lr * g[i];
}

template <class T>
struct AdamCoefficients {
  T beta1, beta2, rest1, rest2, step_size, inverse_correction2, eps, weight_decay, shrink;
};

template <class T, bool Amsgrad>
TANDEM_CLONES void adam_dense(std::int64_t n, AdamCoefficients<T> c, const T* g, T* m, T* v, T* vmax, const T* p,
                              T* to) {
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
    to[i] = w - c.step_size * mi / (std::sqrt(scale) * c.inverse_correction2 + c.eps);
  }
}

}  // namespace

void sgd_step(const SGDArgs& args) {
  dispatch_real("SGD", args.parameter.dtype, [&]<class T>() {
    const SGDCoefficients<T> c{static_cast<T>(args.lr), static_cast<T>(args.momentum),
                               static_cast<T>(1.0 - args.dampening), static_cast<T>(args.weight_decay)};
    const T* g = args.gradient.ptr<T>();
    T *b = args.momentum_buffer.ptr<T>(), *p = args.parameter.ptr<T>();
    parallel_for(args.parameter.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      write_new(end - begin, p + begin, args.streaming, [&](std::int64_t at, std::int64_t m, T* to) {
        const std::int64_t i = begin + at;
        if (b == nullptr && args.weight_decay == 0)
          sgd_plain<T>(m, c.lr, g + i, p + i, to);
        else if (b == nullptr)
          sgd_dense<T, 0, false>(m, c, g + i, nullptr, p + i, to);
        else if (args.first_step && args.nesterov)
          sgd_dense<T, 1, true>(m, c, g + i, b + i, p + i, to);
        else if (args.first_step)
          sgd_dense<T, 1, false>(m, c, g + i, b + i, p + i, to);
        else if (args.nesterov)
          sgd_dense<T, 2, true>(m, c, g + i, b + i, p + i, to);
        else
          sgd_dense<T, 2, false>(m, c, g + i, b + i, p + i, to);
      });
    });
  });
}

void adam_step(const AdamArgs& args) {
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
      write_new(end - begin, p + begin, args.streaming, [&](std::int64_t at, std::int64_t n, T* to) {
        const std::int64_t i = begin + at;
        if (vmax != nullptr)
          adam_dense<T, true>(n, c, g + i, m + i, v + i, vmax + i, p + i, to);
        else
          adam_dense<T, false>(n, c, g + i, m + i, v + i, nullptr, p + i, to);
      });
    });
  });
}

}  // namespace tandem::cpu
