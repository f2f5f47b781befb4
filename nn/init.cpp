#include <tandem/nn/init.h>

#include <algorithm>
#include <cmath>

#include <tandem/autograd/functions.h>
#include <tandem/autograd/grad_mode.h>
#include <tandem/tensor/create.h>

namespace tandem::nn::init {
namespace {

struct Fans {
  double in, out;
};
Fans fans(const char* op, const Tensor& t) {
  check(t.dim() >= 2, op, "needs a weight {{out, in, ...}}, but the tensor is {}; use uniform_ or normal_", t.shape());
  double rest = 1;
  for (int d = 2; d < t.dim(); ++d) rest *= static_cast<double>(t.size(d));
  return {static_cast<double>(t.size(1)) * rest, static_cast<double>(t.size(0)) * rest};
}

// A fan of zero belongs to a tensor without elements; any spread does.
double inverse_root(double x) { return x > 0 ? 1 / std::sqrt(x) : 0; }

double kaiming_std(const char* op, const Tensor& t, const KaimingOptions& options) {
  const Fans f = fans(op, t);
  return calculate_gain(options.nonlinearity, options.a) * inverse_root(options.mode == Fan::in ? f.in : f.out);
}

void check_real(const char* op, const Tensor& t) {
  check(is_real(t.dtype()), op, "the tensor is {}; only float32 and float64 are initialised at random", t.dtype());
}

}  // namespace

Tensor uniform_(Tensor t, double low, double high) {
  check_real("uniform_", t);
  check(low <= high, "uniform_", "the range {} to {} is empty; give the lower bound first", low, high);
  const NoGradGuard no_grad;
  return t.copy_(rand_like(t).mul_(high - low).add_(low));
}

Tensor normal_(Tensor t, double mean, double std) {
  check_real("normal_", t);
  check(std >= 0, "normal_", "the standard deviation is {}; it cannot be negative", std);
  const NoGradGuard no_grad;
  return t.copy_(randn_like(t).mul_(std).add_(mean));
}

Tensor constant_(Tensor t, Scalar value) {
  const NoGradGuard no_grad;
  return t.fill_(value);
}
Tensor zeros_(Tensor t) { return constant_(t, 0); }
Tensor ones_(Tensor t) { return constant_(t, 1); }

Tensor eye_(Tensor t) {
  check(t.dim() == 2, "eye_", "needs a matrix, but the tensor is {}", t.shape());
  const NoGradGuard no_grad;
  const int64_t rows = t.size(0), columns = t.size(1);
  const Tensor identity = eye(std::max(rows, columns), {.dtype = t.dtype(), .device = t.device()});
  return t.copy_(identity.narrow(0, 0, rows).narrow(1, 0, columns));
}

Tensor xavier_uniform_(Tensor t, double gain) {
  const Fans f = fans("xavier_uniform_", t);
  const double bound = gain * std::sqrt(6.0) * inverse_root(f.in + f.out);
  return uniform_(t, -bound, bound);
}

Tensor xavier_normal_(Tensor t, double gain) {
  const Fans f = fans("xavier_normal_", t);
  return normal_(t, 0, gain * std::sqrt(2.0) * inverse_root(f.in + f.out));
}

double calculate_gain(Nonlinearity nonlinearity, double a) {
  switch (nonlinearity) {
    case Nonlinearity::tanh:
      return 5.0 / 3;
    case Nonlinearity::relu:
      return std::sqrt(2.0);
    case Nonlinearity::leaky_relu:
      return std::sqrt(2 / (1 + a * a));
    case Nonlinearity::linear:
    case Nonlinearity::sigmoid:
      break;
  }
  return 1;
}

Tensor kaiming_uniform_(Tensor t, const KaimingOptions& options) {
  const double bound = std::sqrt(3.0) * kaiming_std("kaiming_uniform_", t, options);
  return uniform_(t, -bound, bound);
}
Tensor kaiming_normal_(Tensor t, const KaimingOptions& options) {
  return normal_(t, 0, kaiming_std("kaiming_normal_", t, options));
}

}  // namespace tandem::nn::init
