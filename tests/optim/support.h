// What the tests of the optimizers share: parameters, gradients that are known functions, and comparing bits.
#pragma once
#include <cmath>
#include <string>
#include <vector>

#include <tandem/optim/adam.h>
#include <tandem/optim/sgd.h>
#include <tandem/tests/support/test.h>

namespace tandem::test {

/// A leaf with these values.
inline Tensor leaf(const std::vector<double>& values, DType dtype = float64, Device device = {}) {
  return tensor(values, {.device = device}).to(dtype).detach().requires_grad_();
}

/// The gradient of a parameter with n elements at step t.
inline std::vector<double> gradient_at(int t, int64_t n = 4) {
  std::vector<double> g;
  for (int64_t i = 0; i < n; ++i) g.push_back(std::sin(1.3 * static_cast<double>(i) + 0.7 * t));
  return g;
}

inline void set_gradient(Tensor& p, const std::vector<double>& values) {
  p.set_grad(tensor(values, {.device = p.device()}).to(p.dtype()).reshape(p.shape()));
}

/// Steps t = first .. last-1 with the gradients above.
inline void run_steps(optim::Optimizer& optimizer, int first, int last) {
  for (int t = first; t < last; ++t) {
    for (Tensor& p : optimizer.parameters()) set_gradient(p, gradient_at(t, p.numel()));
    optimizer.step();
  }
}

/// The entry of a state, or an undefined tensor.
inline Tensor entry(const NamedTensors& state, const std::string& name) {
  for (const auto& [key, value] : state)
    if (key == name) return value;
  return {};
}

/// A copy that later steps do not change.
inline NamedTensors copy_of(const NamedTensors& state) {
  NamedTensors copy;
  for (const auto& [name, value] : state) copy.emplace_back(name, value.clone());
  return copy;
}

inline bool same_state(const NamedTensors& a, const NamedTensors& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i].first != b[i].first || !equal(a[i].second, b[i].second)) return false;
  return true;
}

}  // namespace tandem::test
