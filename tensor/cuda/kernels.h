// The CUDA kernels that fill the table in backend.cpp; their meaning is given at `struct Backend`. Each gives its work
// to the calling thread's stream and returns.
#pragma once
#include <tandem/tensor/backend.h>

namespace tandem::cuda {

// allocator.cpp
void* allocate(Device device, std::size_t bytes);
void release(Device device, void* data, std::size_t bytes);
// copy.cpp
void copy(const View& from, const View& to, bool non_blocking);
// convert.cu
/// Both on one device.
void convert(const View& from, const View& to);
void fill(const View& to, Scalar value);
void arange(Scalar start, Scalar step, const View& y);
// pointwise.cu
void unary(UnaryOp op, const View& x, const View& y);
void unary_grad(UnaryOp op, const View& g, const View& x_or_y, const View& dx);
void compare(CompareOp op, const View& a, const View& b, const View& y);
void ternary(TernaryOp op, const View& a, const View& b, const View& c, const View& y);
void ternary_grad(TernaryOp op, int operand, const View& g, const View& a, const View& b, const View& c, const View& d);
// pointwise_binary.cu
void binary(BinaryOp op, const View& a, const View& b, const View& y);
void binary_grad(BinaryOp op, int operand, const View& g, const View& a, const View& b, const View& d);
// reduce.cu
void reduce(ReduceKind kind, const View& x, const View& to);
void arg_reduce(bool largest, int dim, const View& x, const View& values, const View& indices);
// matmul.cpp
void matmul(const View& a, const View& b, const View& c);
void linear(const View& x, const View& w, const View& bias, bool relu, const View& y);
void linear_weight_grad(const View& g, const View& x, const View& dw, const View& db);
bool linear_relu_mask(const View& x, const View& w, const View& bias, const View& y, const View& mask);
void linear_relu_input_grad(const View& g, const View& w, const View& y, const View& mask, const View& dx,
                            const View& db);
// bias.cu
void bias_relu_grad(const View& g, const View& y, const View& dz, const View& db);
/// y[i, j] += bias[j], then ReLU: what follows a product that does not do it itself.
void add_bias(const View& bias, bool relu, const View& y);
// softmax.cu
void softmax(bool log, const View& x, const View& y);
void softmax_grad(bool log, const View& g, const View& y, const View& dx);
void cross_entropy(const CrossEntropyArgs& args, const View& losses, const View& weights);
void cross_entropy_grad(const CrossEntropyArgs& args, const View& g, const View& dx);
void mean_of_rows(const View& losses, const View& weights, const View& mean, const View& scale);
// range_check.cu
void check_range(const RangeCheck& check, const View& numbers);
// index.cu
void index_select(const View& x, int dim, const View& index, const View& y);
void index_add(const View& g, int dim, const View& index, const View& x);
void gather(const View& x, int dim, const View& index, const View& y);
void scatter_add(const View& g, int dim, const View& index, const View& x);
// random.cu
void random(RandomKind kind, double low, double high, const PhiloxKey& key, const View& y);
// optimizer.cu
void sgd_step(std::span<const SGDArgs> args, MakeReplay<SGDArgs> replay);
void adam_step(std::span<const AdamArgs> args, MakeReplay<AdamArgs> replay);

}  // namespace tandem::cuda
