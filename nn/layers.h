// The layers. Each module class has a holder of the same name without "Impl".
#pragma once
#include <tandem/nn/holder.h>
#include <tandem/nn/module.h>

namespace tandem::nn {

/// Whether a Linear has a bias, and where and in which type its parameters are made.
struct LinearOptions {
  bool bias = true;
  Device device = {};
  DType dtype = float32;
};
/// x weight^T + bias: input {..., in}, output {..., out}. Weight {out, in} and bias {out} start uniform in
/// (-1/sqrt(in), 1/sqrt(in)).
class LinearImpl : public Module {
 public:
  LinearImpl(int64_t in_features, int64_t out_features, const LinearOptions& options = {});
  Tensor forward(const Tensor& x) override;
  std::string extra() const override;
  /// Draws new initial values.
  void reset_parameters();
  Parameter weight, bias;  // bias is undefined without one
};
/// Handle to a LinearImpl.
struct Linear : Holder<LinearImpl> {
  using Holder::Holder;
  Linear(int64_t in_features, int64_t out_features, const LinearOptions& options = {})
      : Holder(std::make_shared<LinearImpl>(in_features, out_features, options)) {}
};

/// max(x, 0)
class ReLUImpl : public Module {
 public:
  Tensor forward(const Tensor& x) override;
};
/// Handle to a ReLUImpl.
struct ReLU : Holder<ReLUImpl> {
  using Holder::Holder;
};

/// 1 / (1 + exp(-x))
class SigmoidImpl : public Module {
 public:
  Tensor forward(const Tensor& x) override;
};
/// Handle to a SigmoidImpl.
struct Sigmoid : Holder<SigmoidImpl> {
  using Holder::Holder;
};

/// tanh(x)
class TanhImpl : public Module {
 public:
  Tensor forward(const Tensor& x) override;
};
/// Handle to a TanhImpl.
struct Tanh : Holder<TanhImpl> {
  using Holder::Holder;
};

/// x times the standard normal distribution function of x
class GELUImpl : public Module {
 public:
  Tensor forward(const Tensor& x) override;
};
/// Handle to a GELUImpl.
struct GELU : Holder<GELUImpl> {
  using Holder::Holder;
};

/// exp(x) / sum(exp(x)) along a dimension
class SoftmaxImpl : public Module {
 public:
  explicit SoftmaxImpl(int64_t dim) : dim_(dim) {}
  Tensor forward(const Tensor& x) override;
  std::string extra() const override;

 private:
  const int64_t dim_;
};
/// Handle to a SoftmaxImpl.
struct Softmax : Holder<SoftmaxImpl> {
  using Holder::Holder;
};

/// Dimensions start_dim..end_dim (inclusive) as one; by default all but the first.
class FlattenImpl : public Module {
 public:
  explicit FlattenImpl(int64_t start_dim = 1, int64_t end_dim = -1) : start_dim_(start_dim), end_dim_(end_dim) {}
  Tensor forward(const Tensor& x) override;
  std::string extra() const override;

 private:
  const int64_t start_dim_, end_dim_;
};
/// Handle to a FlattenImpl.
struct Flatten : Holder<FlattenImpl> {
  using Holder::Holder;
};

/// In training zeroes each element with probability p and scales the others by 1 / (1 - p); the identity in evaluation.
class DropoutImpl : public Module {
 public:
  explicit DropoutImpl(double p = 0.5);
  Tensor forward(const Tensor& x) override;
  std::string extra() const override;

 private:
  const double p_;
};
/// Handle to a DropoutImpl.
struct Dropout : Holder<DropoutImpl> {
  using Holder::Holder;
};

/// Returns its input.
class IdentityImpl : public Module {
 public:
  Tensor forward(const Tensor& x) override { return x; }
};
/// Handle to a IdentityImpl.
struct Identity : Holder<IdentityImpl> {
  using Holder::Holder;
};

}  // namespace tandem::nn
