#include <tandem/tensor/cuda/backend.h>

#include <tandem/tensor/cuda/kernels.h>

namespace tandem::cuda {

const Backend kBackend = {
    .name = "CUDA",
    .allocate = allocate,
    .release = release,
    .copy = copy,
    .fill = fill,
    .unary = unary,
    .unary_grad = unary_grad,
    .binary = binary,
    .binary_grad = binary_grad,
    .compare = compare,
    .ternary = ternary,
    .ternary_grad = ternary_grad,
    .reduce = nullptr,
    .arg_reduce = nullptr,
    .matmul = nullptr,
    .linear = nullptr,
    .bias_relu_grad = nullptr,
    .softmax = nullptr,
    .softmax_grad = nullptr,
    .cross_entropy = nullptr,
    .cross_entropy_grad = nullptr,
    .index_select = nullptr,
    .index_add = nullptr,
    .gather = nullptr,
    .scatter_add = nullptr,
    .random = nullptr,
    .sgd_step = nullptr,
    .adam_step = nullptr,
};

}  // namespace tandem::cuda
