// The bare limit of a training step of the MLP 784-512-512-10: the products as direct oneDNN calls and the update as
// plain loops, without tensors, graph or allocation.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace bench {

/// How the forward products are computed; backward is always sgemm, which is the faster there.
enum class BareForward { sgemm, matmul };

class BareStep {
 public:
  /// `adam` or plain SGD; oneDNN uses `threads` threads.
  BareStep(std::int64_t batch_size, bool adam, int threads, BareForward forward);
  ~BareStep();
  /// One step: 3 forward and 5 backward products, bias, ReLU, their gradients, and the update of 669,706 parameters.
  void run();
  /// The 8 products alone.
  void run_products();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace bench
