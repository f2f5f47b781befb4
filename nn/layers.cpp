#include <tandem/nn/layers.h>

#include <cmath>

#include <tandem/autograd/functions.h>
#include <tandem/nn/init.h>
#include <tandem/tensor/create.h>

namespace tandem::nn {

LinearImpl::LinearImpl(int64_t in_features, int64_t out_features, const LinearOptions& options) {
  check(in_features >= 0 && out_features >= 0, "Linear",
        "in_features is {} and out_features {}; neither can be negative", in_features, out_features);
  check(is_real(options.dtype), "Linear", "the dtype is {}; it must be float32 or float64", options.dtype);
  const TensorOptions made{.dtype = options.dtype, .device = options.device};
  weight = register_parameter("weight", empty({out_features, in_features}, made));
  if (options.bias) bias = register_parameter("bias", empty({out_features}, made));
  reset_parameters();
}

void LinearImpl::reset_parameters() {
  const int64_t in = weight.size(1);
  const double bound = in > 0 ? 1 / std::sqrt(static_cast<double>(in)) : 0;
  init::uniform_(weight, -bound, bound);
  if (bias.defined()) init::uniform_(bias, -bound, bound);
}

Tensor LinearImpl::forward(const Tensor& x) { return linear(x, weight, bias); }
std::string LinearImpl::extra() const {
  return fmt::format("in_features={}, out_features={}, bias={}", weight.size(1), weight.size(0),
                     bias.defined() ? "True" : "False");
}

Tensor ReLUImpl::forward(const Tensor& x) { return relu(x); }
Tensor SigmoidImpl::forward(const Tensor& x) { return sigmoid(x); }
Tensor TanhImpl::forward(const Tensor& x) { return tanh(x); }
Tensor GELUImpl::forward(const Tensor& x) { return gelu(x); }

Tensor SoftmaxImpl::forward(const Tensor& x) { return softmax(x, dim_); }
std::string SoftmaxImpl::extra() const { return fmt::format("dim={}", dim_); }

Tensor FlattenImpl::forward(const Tensor& x) { return x.flatten(start_dim_, end_dim_); }
std::string FlattenImpl::extra() const { return fmt::format("start_dim={}, end_dim={}", start_dim_, end_dim_); }

DropoutImpl::DropoutImpl(double p) : p_(p) {
  check(p >= 0 && p <= 1, "Dropout", "the probability is {}; it must lie in 0..1", p);
}
Tensor DropoutImpl::forward(const Tensor& x) { return dropout(x, p_, is_training()); }
std::string DropoutImpl::extra() const { return fmt::format("p={}", p_); }

}  // namespace tandem::nn
