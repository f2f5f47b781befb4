#include <tandem/tensor/cpu/allocator.h>
#include <tandem/tensor/cpu/kernels.h>

namespace tandem {

const Backend kCpuBackend = {
    .name = "CPU",
    .allocate = cpu::allocate,
    .release = cpu::release,
    .copy = cpu::copy,
    .fill = cpu::fill,
    .arange = cpu::arange,
    .unary = cpu::unary,
    .unary_grad = cpu::unary_grad,
    .binary = cpu::binary,
    .binary_grad = cpu::binary_grad,
    .compare = cpu::compare,
    .ternary = cpu::ternary,
    .ternary_grad = cpu::ternary_grad,
    .reduce = cpu::reduce,
    .arg_reduce = cpu::arg_reduce,
    .matmul = cpu::matmul,
    .linear = cpu::linear,
    .bias_relu_grad = cpu::bias_relu_grad,
    .linear_weight_grad = cpu::linear_weight_grad,
    .linear_relu_mask = nullptr,
    .linear_relu_input_grad = nullptr,
    .softmax = cpu::softmax,
    .softmax_grad = cpu::softmax_grad,
    .cross_entropy = cpu::cross_entropy,
    .cross_entropy_grad = cpu::cross_entropy_grad,
    .mean_of_rows = cpu::mean_of_rows,
    .check_range = cpu::check_range,
    .index_select = cpu::index_select,
    .index_add = cpu::index_add,
    .gather = cpu::gather,
    .scatter_add = cpu::scatter_add,
    .random = cpu::random,
    .sgd_step = cpu::sgd_step,
    .adam_step = cpu::adam_step,
};

}  // namespace tandem
