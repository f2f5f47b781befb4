// Clipping of gradients, between backward and the optimizer's step.
#pragma once
#include <vector>

#include <tandem/tensor/tensor.h>

namespace tandem::nn::utils {

/// Scales all gradients by one factor so that the norm of all their elements together is at most `max_norm`, and
/// returns that norm as it was: float64, of shape {}, on the gradients' device, where a GPU is not waited for.
/// Undefined gradients are skipped. A norm that is not finite throws Error if asked for, which waits; then the
/// gradients are unchanged.
Tensor clip_grad_norm_(const std::vector<Tensor>& parameters, double max_norm, bool error_if_nonfinite = false);

/// Limits every element of every gradient to [-clip_value, clip_value].
void clip_grad_value_(const std::vector<Tensor>& parameters, double clip_value);

}  // namespace tandem::nn::utils
