// Clipping of gradients, between backward and the optimizer's step.
#pragma once
#include <vector>

#include <tandem/tensor/tensor.h>

namespace tandem::nn::utils {

/// Scales all gradients by one factor so that the norm of all their elements together is at most `max_norm`, and
/// returns that norm as it was. Undefined gradients are skipped. A norm that is not finite throws Error if asked for,
/// and then the gradients are unchanged. Waits for a GPU; the two functions below do the same and do not.
double clip_grad_norm_(const std::vector<Tensor>& parameters, double max_norm, bool error_if_nonfinite = false);

/// The norm of all elements of these tensors together: float64, shape {}, on their device (that of the first one on a
/// GPU, if any is). Undefined tensors are skipped. Nothing is read from a GPU, so a graph can capture it.
Tensor get_total_norm(const std::vector<Tensor>& tensors);

/// Scales all gradients by max_norm / (total_norm + 1e-6) where that is below 1. Undefined gradients are skipped.
/// Nothing is read from a GPU, so a graph can capture it.
void clip_grads_with_norm_(const std::vector<Tensor>& parameters, double max_norm, const Tensor& total_norm);

/// Limits every element of every gradient to [-clip_value, clip_value].
void clip_grad_value_(const std::vector<Tensor>& parameters, double clip_value);

}  // namespace tandem::nn::utils
