// gradcheck: compares the gradients that backward computes with differences of the function's values.
#pragma once
#include <vector>

#include <tandem/tensor/callable.h>
#include <tandem/tensor/tensor.h>

namespace tandem::autograd {

/// Step of the differences, and the tolerance atol + rtol * |numerical|. The defaults are meant for float64.
struct GradcheckOptions {
  double eps = 1e-6;
  double atol = 1e-5;
  double rtol = 1e-3;
};

/// Checks d(output)/d(input) of every output element and every element of each float64 input that requires grad, by
/// central differences. Returns true, or throws Error naming the first element that differs and both values.
bool gradcheck(FunctionRef<std::vector<Tensor>(const std::vector<Tensor>&)> function, const std::vector<Tensor>& inputs,
               const GradcheckOptions& options = {});
/// The same for a function with one result.
bool gradcheck(FunctionRef<Tensor(const std::vector<Tensor>&)> function, const std::vector<Tensor>& inputs,
               const GradcheckOptions& options = {});

}  // namespace tandem::autograd
