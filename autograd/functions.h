// The functions on tensors. All are recorded for backward where an input requires grad, unless they say otherwise.
// Operands broadcast, and types are promoted as in PyTorch: between tensors with dimensions first, then single-number
// tensors, then C++ numbers, which count only when they are of a higher kind (bool < integer < real).
#pragma once
#include <string_view>
#include <vector>

#include <tandem/tensor/pointwise.h>
#include <tandem/tensor/tensor.h>

namespace tandem {

// Pointwise, one row each in tensor/pointwise.h.

/// @name Pointwise, of one tensor
/// gelu is the exact form x * Phi(x). Integers become float32 where the result is real; bool is an error.
/// @{
#define X(op, ...) Tensor op(const Tensor& x);
TANDEM_UNARY_OPS(X)  // neg, abs, relu, exp, log, sqrt, sigmoid, tanh, gelu
#undef X
/// @}

/// @name Pointwise, of two tensors or a tensor and a number
/// Shapes broadcast; bool operands are converted to the other operand's type, two bools are an error. div is true
/// division: integers give float32. maximum and minimum share the gradient of a tie; NaN wins.
/// @{
#define X(op, ...)                             \
  Tensor op(const Tensor& a, const Tensor& b); \
  Tensor op(const Tensor& a, Scalar b);        \
  Tensor op(Scalar a, const Tensor& b);
TANDEM_BINARY_OPS(X)  // add, sub, mul, div, maximum, minimum, pow
#undef X
/// @}

/// @name Comparisons
/// Their results are bool tensors, not differentiable.
/// @{
#define X(op, ...)                             \
  Tensor op(const Tensor& a, const Tensor& b); \
  Tensor op(const Tensor& a, Scalar b);
TANDEM_COMPARE_OPS(X)  // eq, ne, lt, le, gt, ge
#undef X
/// @}

/// @name Operators
/// The same functions as symbols.
/// @{
inline Tensor operator-(const Tensor& x) { return neg(x); }
#define TANDEM_OPERATOR(symbol, function)                                                    \
  inline Tensor operator symbol(const Tensor& a, const Tensor& b) { return function(a, b); } \
  inline Tensor operator symbol(const Tensor& a, Scalar b) { return function(a, b); }
#define TANDEM_ARITHMETIC(symbol, function) \
  TANDEM_OPERATOR(symbol, function)         \
  inline Tensor operator symbol(Scalar a, const Tensor& b) { return function(a, b); }
TANDEM_ARITHMETIC(+, add)
TANDEM_ARITHMETIC(-, sub)
TANDEM_ARITHMETIC(*, mul)
TANDEM_ARITHMETIC(/, div)
TANDEM_OPERATOR(==, eq)
TANDEM_OPERATOR(!=, ne)
TANDEM_OPERATOR(<, lt)
TANDEM_OPERATOR(<=, le)
TANDEM_OPERATOR(>, gt)
TANDEM_OPERATOR(>=, ge)
#undef TANDEM_ARITHMETIC
#undef TANDEM_OPERATOR
/// @}

/// Elements of a where `condition` (bool) is true, of b elsewhere; all three broadcast.
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);
/// Elements limited to [low, high]; the gradient passes where low <= x <= high.
Tensor clamp(const Tensor& x, Scalar low, Scalar high);

// Products.

/// Matrix product: {m, k} x {k, n}; leading dimensions are batches and broadcast; a vector counts as a row on the left
/// and a column on the right and disappears from the result. float32 or float64.
Tensor matmul(const Tensor& a, const Tensor& b);
/// x w^T + bias, then ReLU if asked: x {..., in}, w {out, in}, bias {out} or undefined; result {..., out}.
Tensor linear(const Tensor& x, const Tensor& w, const Tensor& bias = {}, bool relu = false);

// Reductions. Without dimensions they reduce all; `keepdim` leaves reduced dimensions with size 1.

/// Integers and bool are summed in int64.
Tensor sum(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
/// Reals only. The mean of no elements is NaN.
Tensor mean(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
/// Sum of squared distances from the mean over (n - correction). Reals only.
Tensor var(const Tensor& x, const Dims& dims = {}, int64_t correction = 1, bool keepdim = false);
/// Square root of the sum of squares. Its gradient at zero is zero. Reals only.
Tensor norm(const Tensor& x, const Dims& dims = {}, bool keepdim = false);

/// Extreme values along a dimension and the index (int64) of the first of each.
struct ValuesIndices {
  Tensor values, indices;
};
/// The largest element; equal ones share the gradient. Error without elements.
Tensor max(const Tensor& x);
Tensor min(const Tensor& x);
/// The largest along a dimension; the gradient goes to the first of equals.
ValuesIndices max(const Tensor& x, int64_t dim, bool keepdim = false);
ValuesIndices min(const Tensor& x, int64_t dim, bool keepdim = false);
/// Index of the first largest element, of all or along a dimension; int64, not differentiable.
Tensor argmax(const Tensor& x);
Tensor argmax(const Tensor& x, int64_t dim, bool keepdim = false);

// Softmax and losses.

/// exp(x) / sum(exp(x)) along a dimension.
Tensor softmax(const Tensor& x, int64_t dim);
/// x - log(sum(exp(x))) along a dimension.
Tensor log_softmax(const Tensor& x, int64_t dim);

/// How a loss over rows becomes one number: their mean, their sum, or not at all.
enum class Reduction { mean, sum, none };
/// A loss as sum and normaliser: the mean is their quotient. Several parts of a batch combine exactly by adding both.
struct LossParts {
  Tensor sum;         // recorded for backward
  Tensor normalizer;  // rows, or the weights of the labels that are not ignored
};
/// sum / normalizer: the mean of a batch from its parts' sums and normalisers. 0, with gradient 0, when there is
/// nothing to take a mean of.
Tensor mean_of_parts(const Tensor& sum, double normalizer);
/// How cross_entropy weighs and combines the rows.
struct CrossEntropyOptions {
  Tensor weight = {};  // one weight a class
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
  double label_smoothing = 0;
};
/// Logits {n, classes}, labels {n} int64. A label out of range is an error that names it (of a GPU, when it is waited
/// for). `mean` divides by the sum of the weights of labels not ignored; if all are or n is 0, loss and gradient are 0.
Tensor cross_entropy(const Tensor& logits, const Tensor& labels, const CrossEntropyOptions& options = {});
LossParts cross_entropy_parts(const Tensor& logits, const Tensor& labels, const CrossEntropyOptions& options = {});

/// How nll_loss weighs and combines the rows.
struct NLLOptions {
  Tensor weight = {};
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
};
/// Minus the log-probability of each label: log_probabilities {n, classes}, labels {n} int64.
Tensor nll_loss(const Tensor& log_probabilities, const Tensor& labels, const NLLOptions& options = {});
LossParts nll_loss_parts(const Tensor& log_probabilities, const Tensor& labels, const NLLOptions& options = {});
/// Squared difference; shapes must be equal.
Tensor mse_loss(const Tensor& x, const Tensor& target, Reduction reduction = Reduction::mean);
LossParts mse_loss_parts(const Tensor& x, const Tensor& target);

// Joining and indexing.

/// Tensors joined along an existing dimension; the other sizes must be equal. An empty vector {0} is skipped.
Tensor cat(const std::vector<Tensor>& tensors, int64_t dim = 0);
/// Tensors of one shape joined along a new dimension.
Tensor stack(const std::vector<Tensor>& tensors, int64_t dim = 0);
/// The slices of x at the indices (int64 vector) along a dimension.
Tensor index_select(const Tensor& x, int64_t dim, const Tensor& index);
/// y[i][j] = x[index[i][j]][j] for dim 0, and so on: index has as many dimensions as x.
Tensor gather(const Tensor& x, int64_t dim, const Tensor& index);
/// A 1 at each label: labels {...} int64, result {..., classes} int64. Not differentiable.
Tensor one_hot(const Tensor& labels, int64_t classes);

/// Zeroes each element with probability p and scales the others by 1 / (1 - p); the identity unless `training`.
Tensor dropout(const Tensor& x, double p, bool training);

/// Whether both have the same shape and all elements differ by at most atol + rtol * |b|. NaN equals nothing.
bool allclose(const Tensor& a, const Tensor& b, double rtol = 1e-5, double atol = 1e-8);
/// Whether both have the same shape, type and elements.
bool equal(const Tensor& a, const Tensor& b);
/// The type that an operation on both computes in; see the top of this file.
DType result_type(const Tensor& a, const Tensor& b);

}  // namespace tandem
