// cuBLASLt: descriptors are bags of attributes, a product is what three of them and four layouts say together.
#pragma once
#include <cublasLt.h>

#include <cstdint>
#include <cstring>
#include <map>

namespace cuda_double {

/// The attributes of a descriptor, all of at most eight bytes, with the sizes that the headers give them.
class Attributes {
 public:
  template <class T>
  void put(int attribute, T value) {
    Value& stored = values_[attribute];
    stored.size = sizeof(T);
    std::memcpy(stored.bytes, &value, sizeof(T));
  }
  template <class T>
  T get(int attribute) const {
    T value = {};
    std::memcpy(&value, values_.at(attribute).bytes, sizeof(T));
    return value;
  }
  cublasStatus_t set(int attribute, const void* buffer, size_t size);
  cublasStatus_t read(int attribute, void* buffer, size_t size, size_t* written) const;

 private:
  struct Value {
    size_t size = 0;
    char bytes[8] = {};
  };
  std::map<int, Value> values_;
};

inline Attributes& attributes_of(cublasLtMatmulDesc_t desc) { return *reinterpret_cast<Attributes*>(desc); }
inline Attributes& attributes_of(cublasLtMatrixLayout_t desc) { return *reinterpret_cast<Attributes*>(desc); }
inline Attributes& attributes_of(cublasLtMatmulPreference_t desc) { return *reinterpret_cast<Attributes*>(desc); }

struct Matrix {
  int type = 0, order = 0, batches = 1;
  int64_t rows = 0, columns = 0, leading = 0, stride = 0;

  size_t width() const { return type == CUDA_R_64F ? 8 : 4; }
  int64_t at(int64_t row, int64_t column) const {
    return order == CUBLASLT_ORDER_ROW ? row * leading + column : row + column * leading;
  }
  size_t bytes() const { return width() * static_cast<size_t>(at(rows - 1, columns - 1) + 1 + (batches - 1) * stride); }
};

/// D = epilogue(alpha op(A) op(B) + beta C), with op(A) of m x k and op(B) of k x n.
struct Product {
  Matrix a = {}, b = {}, c = {}, d = {};
  bool transpose_a = false, transpose_b = false;
  int64_t m = 0, n = 0, k = 0;
  unsigned epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void* bias = nullptr;     // read by BIAS, written by the gradients of a bias
  uint8_t* mask = nullptr;  // bits, one an element of D
  int64_t bias_stride = 0, mask_leading = 0, mask_stride = 0;
  double alpha = 1, beta = 0;

  bool adds_bias() const { return (epilogue & CUBLASLT_EPILOGUE_BIAS) != 0; }
  bool is_relu() const { return (epilogue & CUBLASLT_EPILOGUE_RELU) != 0; }
  bool is_relu_gradient() const { return (epilogue & 8) != 0; }
  bool uses_mask() const { return (epilogue & 128) != 0; }
  /// Elements of the bias or of its gradient; 0 where there is none.
  int64_t bias_size() const {
    if (epilogue == CUBLASLT_EPILOGUE_BGRADB) return n;
    bool has = adds_bias() || epilogue == CUBLASLT_EPILOGUE_DRELU_BGRAD || epilogue == CUBLASLT_EPILOGUE_BGRADA;
    return has ? m : 0;
  }
  size_t mask_bytes() const { return static_cast<size_t>((n * mask_leading + (d.batches - 1) * mask_stride) / 8); }
};

/// Computes a product on the calling thread. Sums are taken in float64 and rounded once.
void compute(const Product& product, const void* a, const void* b, const void* c, void* d);

}  // namespace cuda_double
