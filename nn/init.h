// Initial values. Each function fills a float32 or float64 tensor in place, without recording, and returns its handle.
// The fans of a weight {out, in, ...} are in and out times the product of the remaining sizes.
#pragma once
#include <tandem/tensor/tensor.h>

namespace tandem::nn::init {

/// Uniform in [low, high).
Tensor uniform_(Tensor t, double low = 0, double high = 1);
Tensor normal_(Tensor t, double mean = 0, double std = 1);
Tensor constant_(Tensor t, Scalar value);
Tensor zeros_(Tensor t);
Tensor ones_(Tensor t);
/// The identity matrix, also of a matrix that is not square; Error unless it has two dimensions.
Tensor eye_(Tensor t);

/// Uniform in [-b, b) with b = gain * sqrt(6 / (fan_in + fan_out)); at least two dimensions, else Error.
Tensor xavier_uniform_(Tensor t, double gain = 1);
/// Normal with deviation gain * sqrt(2 / (fan_in + fan_out)).
Tensor xavier_normal_(Tensor t, double gain = 1);

/// The size that the deviation is scaled by: the inputs of the layer or its outputs.
enum class Fan { in, out };
/// What follows the layer.
enum class Nonlinearity { linear, sigmoid, tanh, relu, leaky_relu };
/// The factor by which a nonlinearity asks for larger weights; `a` is the negative slope of leaky_relu.
double calculate_gain(Nonlinearity nonlinearity, double a = 0.01);

/// What Kaiming initialisation is told of the layer.
struct KaimingOptions {
  double a = 0;  // the negative slope of leaky_relu
  Fan mode = Fan::in;
  Nonlinearity nonlinearity = Nonlinearity::leaky_relu;
};
/// Uniform in [-b, b) with b = gain * sqrt(3 / fan); at least two dimensions, else Error.
Tensor kaiming_uniform_(Tensor t, const KaimingOptions& options = {});
/// Normal with deviation gain / sqrt(fan).
Tensor kaiming_normal_(Tensor t, const KaimingOptions& options = {});

}  // namespace tandem::nn::init
