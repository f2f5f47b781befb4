// What ZeroRedundancyOptimizer must do, as functions that every rank of a group runs: over threads in zero_test.cpp,
// over processes in zero_program.cpp.
#pragma once
#include <functional>
#include <memory>

#include <tandem/tests/parallel/ddp_cases.h>

namespace tandem::test {

using parallel::ZeroRedundancyOptimizer;

std::vector<DdpCase> zero_cases();

/// Makes an optimizer of parameters, or of slices of them.
using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(std::vector<Tensor>)>;
template <class Method>
MakeOptimizer maker(const typename Method::Options& options = {}) {
  return [options](std::vector<Tensor> p) { return std::make_unique<Method>(std::move(p), options); };
}

/// Parameters of sizes that end in the middle of a cache line, with one of a single number and one without elements.
inline std::vector<Tensor> make_parameters(DType dtype) {
  std::vector<Tensor> all;
  for (const Shape& shape : {Shape{7, 13}, Shape{13}, Shape{}, Shape{40, 3}, Shape{0, 5}, Shape{21}})
    all.push_back(wave(shape, 0.3 * static_cast<double>(all.size() + 1), dtype).requires_grad_());
  return all;
}
/// Gives them the gradients of a step, the same on every rank; every third step leaves out number 3.
inline void set_gradients(const std::vector<Tensor>& parameters, int step) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Tensor p = parameters[i];
    const bool left_out = i == 3 && step % 3 == 0;
    p.set_grad(left_out ? Tensor()
                        : wave(p.shape(), 0.7 * step + 0.2 * static_cast<double>(i), float64).mul_(0.3).to(p.dtype()));
  }
}
inline void require_same_values(const std::vector<Tensor>& a, const std::vector<Tensor>& b, const std::string& what) {
  require(a.size() == b.size(), what);
  for (std::size_t i = 0; i < a.size(); ++i)
    require(equal(a[i].detach(), b[i].detach()), fmt::format("the bits of parameter {} {}", i, what));
}
inline void require_same_state(const NamedTensors& a, const NamedTensors& b) {
  require(a.size() == b.size(), "states have the same number of entries");
  for (std::size_t i = 0; i < a.size(); ++i)
    require(a[i].first == b[i].first && a[i].second.dtype() == b[i].second.dtype() && equal(a[i].second, b[i].second),
            fmt::format("{} and {} are the same", a[i].first, b[i].first));
}
inline NamedTensors copy_of(NamedTensors state) {
  for (auto& entry : state) entry.second = entry.second.clone();
  return state;
}

}  // namespace tandem::test
