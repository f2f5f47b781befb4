// The kernel table: one row of function pointers a device type. A new structured operation is a new row here, filled in
// tensor/cpu/backend.cpp; a row left out does not compile, an absent kernel is an explicit nullptr.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <tandem/tensor/callable.h>
#include <tandem/tensor/pointwise.h>
#include <tandem/tensor/random.h>
#include <tandem/tensor/range_check.h>
#include <tandem/tensor/scalar.h>
#include <tandem/tensor/view.h>

namespace tandem {

/// What a reduction computes.
enum class ReduceKind { sum, sum_squares, max, min };
/// What is drawn at random.
enum class RandomKind { uniform, normal, integers, keep_mask };

/// Rows of logits {n, classes}, labels {n} int64; see nn::CrossEntropyLoss for the meaning of each.
struct CrossEntropyArgs {
  View logits, labels;
  View class_weights;  // data == nullptr: all ones
  std::int64_t ignore_index = -100;
  double label_smoothing = 0;
  View log_sum_exp;  // {n}, written by forward, read by backward
};

/// What one optimizer step does to one parameter; a buffer that the method does not keep has no data.
struct SGDArgs {
  View parameter, gradient, momentum_buffer;
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
  bool first_step = false;  // the momentum buffer is taken from the gradient
};
/// The same for Adam and AdamW.
struct AdamArgs {
  View parameter, gradient, exp_avg, exp_avg_sq, max_exp_avg_sq;
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  bool decoupled = false;  // AdamW: the decay multiplies the parameter
  std::int64_t step = 1;
};

/// For a step that is captured in a graph. Before each replay `check` throws Error where it is not possible, and then
/// `next` gives the arguments anew, as of that step.
template <class Args>
struct Replay {
  UniqueFunction<void()> check;
  UniqueFunction<std::vector<Args>()> next;
};
/// Makes one of them; called only where a graph is being captured.
template <class Args>
using MakeReplay = FunctionRef<Replay<Args>()>;

/// Bytes of a row of such bits for a row of `width` elements: cuBLASLt begins rows at multiples of 128 bits.
constexpr std::int64_t mask_bytes(std::int64_t width) { return (width + 127) / 128 * 16; }

/// What a device type can do.
struct Backend {
  const char* name;
  void* (*allocate)(Device device, std::size_t bytes);
  void (*release)(Device device, void* data, std::size_t bytes);
  /// to[i] = from[i], same shape, converting the type; strides may be 0 in `from`. One of the two is on a device of
  /// this type. `non_blocking`: from page-locked memory without waiting for the device.
  void (*copy)(const View& from, const View& to, bool non_blocking);
  void (*fill)(const View& to, Scalar value);
  /// y[i] = start + i * step; y is a vector of int64 (modulo 2^64) or float64.
  void (*arange)(Scalar start, Scalar step, const View& y);

  // Pointwise: views of one shape (broadcast by zero strides) and one dtype.
  void (*unary)(UnaryOp op, const View& x, const View& y);
  void (*unary_grad)(UnaryOp op, const View& g, const View& x_or_y, const View& dx);
  void (*binary)(BinaryOp op, const View& a, const View& b, const View& y);
  /// d = g * dy/d(operand)
  void (*binary_grad)(BinaryOp op, int operand, const View& g, const View& a, const View& b, const View& d);
  void (*compare)(CompareOp op, const View& a, const View& b, const View& y);
  void (*ternary)(TernaryOp op, const View& a, const View& b, const View& c, const View& y);
  void (*ternary_grad)(TernaryOp op, int operand, const View& g, const View& a, const View& b, const View& c,
                       const View& d);

  // Reductions: `to` has x's number of dimensions, with size 1 where x is reduced.
  void (*reduce)(ReduceKind kind, const View& x, const View& to);
  /// Extreme value and its first index along `dim`, which has size 1 in `values` and `indices` (int64).
  void (*arg_reduce)(bool largest, int dim, const View& x, const View& values, const View& indices);

  // Products of matrices: c = a b, any strides for a and b, c row-major.
  void (*matmul)(const View& a, const View& b, const View& c);
  /// y = x w^T (+ bias) (then ReLU); x {n, in}, w {out, in}, y {n, out} row-major; bias.data may be null.
  void (*linear)(const View& x, const View& w, const View& bias, bool relu, const View& y);
  /// dz = y <= 0 ? 0 : g (only when y.data is given; else dz is not written) and db = sum of rows of dz or g.
  void (*bias_relu_grad)(const View& g, const View& y, const View& dz, const View& db);
  /// dw = g^T x and db = sum of rows of g; g row-major, x as in `linear`.
  void (*linear_weight_grad)(const View& g, const View& x, const View& dw, const View& db);
  // What takes a gradient through a linear layer and the ReLU before it in one product; null where there is none.
  /// `linear` with ReLU, which also writes where y > 0: bits, {n, mask_bytes(out)} uint8. False: there is no mask.
  bool (*linear_relu_mask)(const View& x, const View& w, const View& bias, const View& y, const View& mask);
  /// dx = g w where the mask of y has a bit, else 0, and db = sum of rows of dx; y {n, in}, dx alike, db {in}.
  void (*linear_relu_input_grad)(const View& g, const View& w, const View& y, const View& mask, const View& dx,
                                 const View& db);

  // Rows {n, k}, contiguous.
  void (*softmax)(bool log, const View& x, const View& y);
  void (*softmax_grad)(bool log, const View& g, const View& y, const View& dx);
  /// losses {n}: the weighted loss of each row; weights {n}: its share of the normaliser (0 when ignored).
  void (*cross_entropy)(const CrossEntropyArgs& args, const View& losses, const View& weights);
  /// dx = g[row] * d(losses[row])/d(logits)
  void (*cross_entropy_grad)(const CrossEntropyArgs& args, const View& g, const View& dx);
  /// scale {1} = 1 / sum of weights, or 0 where that is 0; mean {1} = sum of losses * scale.
  void (*mean_of_rows)(const View& losses, const View& weights, const View& mean, const View& scale);

  /// An Error about the first of the numbers (int64) that is not good. A device that runs behind the host may give it
  /// later, when the host waits for it; what follows on such a device reads and writes nothing outside its tensors.
  void (*check_range)(const RangeCheck& check, const View& numbers);
  // Indexing; index is int64 and has been given to check_range. `dim` is a dimension of x.
  void (*index_select)(const View& x, int dim, const View& index, const View& y);
  void (*index_add)(const View& g, int dim, const View& index, const View& x);
  void (*gather)(const View& x, int dim, const View& index, const View& y);
  void (*scatter_add)(const View& g, int dim, const View& index, const View& x);

  /// uniform: [0, 1); normal; integers in [low, high); keep_mask: 1 / (1 - low) with probability 1 - low, else 0.
  void (*random)(RandomKind kind, double low, double high, const PhiloxKey& key, const View& y);

  // One step of several parameters of one device and type; `lr` and the other numbers are each parameter's own.
  void (*sgd_step)(std::span<const SGDArgs> args, MakeReplay<SGDArgs> replay);
  void (*adam_step)(std::span<const AdamArgs> args, MakeReplay<AdamArgs> replay);
};

/// The table of a device's type; Error where there is none.
const Backend& backend(Device device);
/// to[i] = from[i] between any devices; see Backend::copy.
void copy_values(const View& from, const View& to, bool non_blocking = false);

/// The kernel, or Error saying that this device has none for `op`.
template <class Function>
Function* kernel(const char* op, const Backend& table, Function* function) {
  check(function != nullptr, op, "has no {} kernel; move the tensors to the CPU with .to(\"cpu\")", table.name);
  return function;
}

extern const Backend kCpuBackend;

}  // namespace tandem
