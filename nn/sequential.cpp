#include <tandem/nn/sequential.h>

#include <typeinfo>

#include <tandem/autograd/functions.h>
#include <tandem/nn/layers.h>

namespace tandem::nn {
namespace {

// The Linear at position i when a ReLU follows it, so that both can be one operation; else null. Classes derived from
// either may compute something else.
const LinearImpl* linear_before_relu(const SequentialImpl& list, std::size_t i) {
  if (i + 1 >= list.size()) return nullptr;
  const Module &first = *list[i], &second = *list[i + 1];
  if (typeid(first) != typeid(LinearImpl) || typeid(second) != typeid(ReLUImpl)) return nullptr;
  return static_cast<const LinearImpl*>(&first);
}

}  // namespace

Tensor SequentialImpl::forward(const Tensor& x) {
  Tensor value = x;
  for (std::size_t i = 0; i < size(); ++i) {
    if (const LinearImpl* fused = linear_before_relu(*this, i)) {
      value = linear(value, fused->weight, fused->bias, true);
      ++i;
    } else {
      value = (*this)[i]->forward(value);
    }
  }
  return value;
}

std::vector<Tensor> SequentialImpl::forward_all(std::span<const Tensor> inputs) {
  std::vector<Tensor> values(inputs.begin(), inputs.end());
  for (std::size_t i = 0; i < size(); ++i) {
    const LinearImpl* fused = values.size() == 1 ? linear_before_relu(*this, i) : nullptr;
    if (fused != nullptr) {
      values[0] = linear(values[0], fused->weight, fused->bias, true);
      ++i;
    } else {
      values = (*this)[i]->forward_all(values);
    }
  }
  return values;
}

}  // namespace tandem::nn
