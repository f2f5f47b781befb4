// Products of matrices by cuBLASLt. It takes matrices by columns and tensors lie by rows, so that it is given the
// transposed product: y^T = w x^T for y = x w^T.
#include <optional>
#include <utility>

#include <tandem/tensor/cuda/allocator.h>
#include <tandem/tensor/cuda/cublas_lt.h>
#include <tandem/tensor/cuda/kernels.h>

namespace tandem::cuda {
namespace {

bool lies_by_rows(const View& v) {
  return (v.strides[1] == 1 || v.shape[1] == 1) && (v.shape[0] == 1 || v.strides[0] >= v.shape[1]);
}

View transpose(View v) {
  std::swap(v.shape[0], v.shape[1]);
  std::swap(v.strides[0], v.strides[1]);
  return v;
}

// The transpose of a matrix that lies by rows: the same memory, taken by columns.
LtMatrix by_columns(const View& v) {
  return {.data = v.data, .rows = v.shape[1], .columns = v.shape[0], .ld = v.shape[0] == 1 ? v.shape[1] : v.strides[0]};
}

// The transpose of an operand for cuBLASLt: the operand itself where one of its strides is 1, else a packed copy.
class Operand {
 public:
  explicit Operand(const View& v) {
    if (lies_by_rows(v)) {
      matrix_ = by_columns(v);
    } else if (lies_by_rows(transpose(v))) {
      matrix_ = by_columns(transpose(v));
      matrix_.transposed = true;
    } else {
      View packed = v;
      copy_.emplace(v.device, static_cast<std::size_t>(v.numel()) * size_of(v.dtype));
      packed.data = copy_->data();
      packed.strides[0] = v.shape[1];
      packed.strides[1] = 1;
      convert(v, packed);
      matrix_ = by_columns(packed);
    }
  }
  const LtMatrix& transposed() const { return matrix_; }

 private:
  LtMatrix matrix_;
  std::optional<Scratch> copy_;
};

bool is_empty(const View& a, const View& c) { return c.numel() == 0 || a.shape[1] == 0; }

// c = a b, then the epilogue, which `in_steps` does otherwise. Whether the epilogue did it.
bool product(const View& a, const View& b, const View& c, cublasLtEpilogue_t epilogue, const View& bias,
             const View& mask, FunctionRef<void()> in_steps) {
  check(is_real(c.dtype), "matmul", "is not defined on {}; convert with .to(float32) first", c.dtype);
  const Operand left(b), right(a);
  return multiply(c.device,
                  {.dtype = c.dtype,
                   .a = left.transposed(),
                   .b = right.transposed(),
                   .d = by_columns(c),
                   .epilogue = epilogue,
                   .bias = bias.data,
                   .mask = mask.data,
                   .mask_ld = mask.data != nullptr ? 8 * mask.shape[1] : 0},
                  in_steps);
}

}  // namespace

void matmul(const View& a, const View& b, const View& c) {
  if (c.numel() == 0) return;
  if (is_empty(a, c)) return fill(c, 0);
  product(a, b, c, CUBLASLT_EPILOGUE_DEFAULT, {}, {}, [&] {
    fail("matmul",
         "cuBLASLt has no algorithm for a product of {} {} x {} by {} x {} on {}; move the tensors to the CPU with "
         ".to(\"cpu\")",
         c.dtype, a.shape[0], a.shape[1], b.shape[0], b.shape[1], c.device);
  });
}

void linear(const View& x, const View& w, const View& bias, bool relu, const View& y) {
  const bool adds = bias.data != nullptr;
  const View wt = transpose(w);
  const auto in_steps = [&] {
    matmul(x, wt, y);
    if (adds || relu) add_bias(bias, relu, y);
  };
  if (!(adds || relu) || is_empty(x, y)) return in_steps();
  const cublasLtEpilogue_t epilogue = !adds  ? CUBLASLT_EPILOGUE_RELU
                                      : relu ? CUBLASLT_EPILOGUE_RELU_BIAS
                                             : CUBLASLT_EPILOGUE_BIAS;
  product(x, wt, y, epilogue, bias, {}, in_steps);
}

void linear_weight_grad(const View& g, const View& x, const View& dw, const View& db) {
  const View gt = transpose(g);
  const auto in_steps = [&] {
    bias_relu_grad(g, {}, {}, db);
    matmul(gt, x, dw);
  };
  if (is_empty(gt, dw)) return in_steps();
  // cuBLASLt is given dw^T = x^T g, whose second operand has a column for each output.
  product(gt, x, dw, CUBLASLT_EPILOGUE_BGRADB, db, {}, in_steps);
}

bool linear_relu_mask(const View& x, const View& w, const View& bias, const View& y, const View& mask) {
  const auto without = [&] { linear(x, w, bias, true, y); };
  if (is_empty(x, y)) {
    without();
    return false;
  }
  const bool adds = bias.data != nullptr;
  return product(x, transpose(w), y, adds ? CUBLASLT_EPILOGUE_RELU_AUX_BIAS : CUBLASLT_EPILOGUE_RELU_AUX, bias, mask,
                 without);
}

void linear_relu_input_grad(const View& g, const View& w, const View& y, const View& mask, const View& dx,
                            const View& db) {
  const auto in_steps = [&] {
    matmul(g, w, dx);
    bias_relu_grad(dx, y, dx, db);
  };
  if (is_empty(g, dx)) return in_steps();
  product(g, w, dx, CUBLASLT_EPILOGUE_DRELU_BGRAD, db, mask, in_steps);
}

}  // namespace tandem::cuda
