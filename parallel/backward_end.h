// How a data-parallel wrapper learns that a backward through its output begins and ends.
#pragma once
#include <memory>

#include <tandem/tensor/tensor.h>

namespace tandem::parallel {

/// What a wrapper does in a backward. Calls come from the thread that called backward, except `begin` in a graph that
/// spans devices.
class BackwardListener {
 public:
  virtual ~BackwardListener() = default;
  /// The backward has reached the wrapper's output; no gradient has gone further.
  virtual void begin() {}
  /// All gradients are there.
  virtual void end() = 0;
  /// The backward failed between begin and end.
  virtual void abandon() {}
};

/// Passes a result through a node, so that every backward through it tells the listener, once however many results of
/// the same listener it goes through; not autograd::grad, which leaves parameters alone. The graph keeps the listener
/// alive. `name` must be a string literal.
Tensor listen(const char* name, const Tensor& result, std::shared_ptr<BackwardListener> listener);

}  // namespace tandem::parallel
