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
    .reduce = reduce,
    .arg_reduce = arg_reduce,
    .matmul = matmul,
    .linear = linear,
    .bias_relu_grad = bias_relu_grad,
    .linear_weight_grad = linear_weight_grad,
    .softmax = softmax,
    .softmax_grad = softmax_grad,
    .cross_entropy = cross_entropy,
    .cross_entropy_grad = cross_entropy_grad,
    .mean_of_rows = mean_of_rows,
    .check_range = check_range,
    .index_select = nullptr,
    .index_add = nullptr,
    .gather = nullptr,
    .scatter_add = nullptr,
    .random = nullptr,
    .sgd_step = nullptr,
    .adam_step = nullptr,
};

}  // namespace tandem::cuda
