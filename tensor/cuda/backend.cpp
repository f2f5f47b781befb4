#include <tandem/tensor/cuda/backend.h>

#include <tandem/tensor/cuda/kernels.h>

namespace tandem::cuda {

const Backend kBackend = {
    .name = "CUDA",
    .allocate = allocate,
    .release = release,
    .copy = copy,
    .fill = fill,
    .arange = arange,
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
    .linear_relu_mask = linear_relu_mask,
    .linear_relu_input_grad = linear_relu_input_grad,
    .softmax = softmax,
    .softmax_grad = softmax_grad,
    .cross_entropy = cross_entropy,
    .cross_entropy_grad = cross_entropy_grad,
    .mean_of_rows = mean_of_rows,
    .check_range = check_range,
    .index_select = index_select,
    .index_add = index_add,
    .gather = gather,
    .scatter_add = scatter_add,
    .random = random,
    .sgd_step = sgd_step,
    .adam_step = adam_step,
};

}  // namespace tandem::cuda
