// The arithmetic of the optimizers' steps, the same on every kind of device. Coefficients are computed in double and
// rounded once.
#pragma once
#include <cmath>

#include <tandem/tensor/backend.h>

namespace tandem {

/// What an element of SGD's step needs; keep = 1 - dampening.
template <class T>
struct SGDCoefficients {
  T lr = 0, momentum = 0, keep = 0, weight_decay = 0;

  static SGDCoefficients of(const SGDArgs& args) {
    return {static_cast<T>(args.lr), static_cast<T>(args.momentum), static_cast<T>(1.0 - args.dampening),
            static_cast<T>(args.weight_decay)};
  }
  TANDEM_HD T decayed(T g, T p) const { return g + weight_decay * p; }
  /// Updates the momentum buffer's element `b` with the gradient `d`; gives what is taken lr times from the parameter.
  TANDEM_HD T through_momentum(T d, T& b, bool first_step, bool nesterov) const {
    const T m = first_step ? d : momentum * b + keep * d;
    b = m;
    return nesterov ? d + momentum * m : m;
  }
};

/// What an element of Adam's step needs.
template <class T>
struct AdamCoefficients {
  T beta1 = 0, beta2 = 0, rest1 = 0, rest2 = 0, step_size = 0, inverse_correction2 = 0, eps = 0, weight_decay = 0,
    shrink = 0;

  static AdamCoefficients of(const AdamArgs& args) {
    // The corrections in double: in float, 1 - beta2^t loses three digits.
    const double correction1 = 1.0 - std::pow(args.beta1, static_cast<double>(args.step));
    const double correction2 = 1.0 - std::pow(args.beta2, static_cast<double>(args.step));
    return {static_cast<T>(args.beta1),
            static_cast<T>(args.beta2),
            static_cast<T>(1.0 - args.beta1),
            static_cast<T>(1.0 - args.beta2),
            static_cast<T>(args.lr / correction1),
            static_cast<T>(1.0 / std::sqrt(correction2)),
            static_cast<T>(args.eps),
            static_cast<T>(args.decoupled ? 0.0 : args.weight_decay),
            static_cast<T>(args.decoupled ? 1.0 - args.lr * args.weight_decay : 1.0)};
  }
  /// Updates the means of the gradient and of its square; `w` is the parameter after its decoupled decay.
  TANDEM_HD void update_means(T g, T w, T& m, T& v) const {
    const T d = g + weight_decay * w;
    m = beta1 * m + rest1 * d;
    v = beta2 * v + rest2 * d * d;
  }
  /// The parameter after its step; `scale` is the mean of squares, or the largest so far.
  TANDEM_HD T moved(T w, T m, T scale) const {
    return w - step_size * m / (std::sqrt(scale) * inverse_correction2 + eps);
  }
};

}  // namespace tandem
