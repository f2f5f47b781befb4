// The numbers of a matrix product and of its epilogues. TF32 gives the numbers of float32: what it loses is not
// modelled, nor is the order in which a device adds.
#include <cmath>
#include <vector>

#include "cublas_lt.h"
#include "quiet.h"

namespace cuda_double {
namespace {

/// sums[i] = sum over p of a[p][i] b[p]; only on local memory, so that ThreadSanitizer need not look.
CUDA_DOUBLE_UNSEEN void multiply(const double* a, const double* b, double* sums, int64_t m, int64_t k) {
  for (int64_t i = 0; i < m; ++i) sums[i] = 0;
  for (int64_t p = 0; p < k; ++p)
    for (int64_t i = 0; i < m; ++i) sums[i] += a[p * m + i] * b[p];
}

/// A product of one batch, on elements of type T.
template <class T>
class Batch {
 public:
  Batch(const Product& product, const void* a, const void* b, const void* c, void* d, int64_t batch)
      : p_(product),
        a_(static_cast<const T*>(a) + batch * product.a.stride),
        b_(static_cast<const T*>(b) + batch * product.b.stride),
        c_(product.beta == 0 ? nullptr : static_cast<const T*>(c) + batch * product.c.stride),
        d_(static_cast<T*>(d) + batch * product.d.stride),
        bias_(static_cast<T*>(product.bias) + (product.bias ? batch * product.bias_stride : 0)),
        mask_(product.mask ? product.mask + batch * product.mask_stride / 8 : nullptr) {}

  void run() {
    std::vector<double> a(static_cast<size_t>(p_.m * p_.k)), b(static_cast<size_t>(p_.k));
    std::vector<double> sums(static_cast<size_t>(p_.m));
    for (int64_t p = 0; p < p_.k; ++p)
      for (int64_t i = 0; i < p_.m; ++i) a[static_cast<size_t>(p * p_.m + i)] = a_at(i, p);
    for (int64_t j = 0; j < p_.n; ++j) {
      for (int64_t p = 0; p < p_.k; ++p) b[static_cast<size_t>(p)] = b_at(p, j);
      multiply(a.data(), b.data(), sums.data(), p_.m, p_.k);
      for (int64_t i = 0; i < p_.m; ++i) finish(i, j, sums[static_cast<size_t>(i)]);
    }
    if (p_.epilogue == CUBLASLT_EPILOGUE_DRELU_BGRAD)
      reduce_bias(p_.m, p_.n, [this](int64_t i, int64_t j) { return d_[p_.d.at(i, j)]; });
    if (p_.epilogue == CUBLASLT_EPILOGUE_BGRADA)
      reduce_bias(p_.m, p_.k, [this](int64_t i, int64_t p) { return a_at(i, p); });
    if (p_.epilogue == CUBLASLT_EPILOGUE_BGRADB)
      reduce_bias(p_.n, p_.k, [this](int64_t j, int64_t p) { return b_at(p, j); });
  }

 private:
  T a_at(int64_t i, int64_t p) const { return a_[p_.transpose_a ? p_.a.at(p, i) : p_.a.at(i, p)]; }
  T b_at(int64_t p, int64_t j) const { return b_[p_.transpose_b ? p_.b.at(j, p) : p_.b.at(p, j)]; }

  void finish(int64_t i, int64_t j, double sum) {
    double value = p_.alpha * sum;
    if (c_) value += p_.beta * c_[p_.c.at(i, j)];
    if (p_.adds_bias()) value += bias_[i];
    int64_t bit = i + j * p_.mask_leading;
    auto one = static_cast<uint8_t>(1u << (bit % 8));
    if (p_.is_relu_gradient() && !(mask_[bit / 8] & one)) value = 0;
    if (p_.is_relu()) {
      bool passes = value > 0 || std::isnan(value);  // NaN is kept, for it tells of memory that nobody wrote
      if (mask_) mask_[bit / 8] = static_cast<uint8_t>(passes ? mask_[bit / 8] | one : mask_[bit / 8] & ~one);
      if (!passes) value = 0;
    }
    d_[p_.d.at(i, j)] = static_cast<T>(value);
  }

  template <class F>
  void reduce_bias(int64_t size, int64_t over, F&& element) {
    for (int64_t i = 0; i < size; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < over; ++j) sum += element(i, j);
      bias_[i] = static_cast<T>(sum);
    }
  }

  const Product& p_;
  const T* a_;
  const T* b_;
  const T* c_;
  T* d_;
  T* bias_;
  uint8_t* mask_;
};

}  // namespace

void compute(const Product& product, const void* a, const void* b, const void* c, void* d) {
  for (int64_t batch = 0; batch < product.d.batches; ++batch) {
    if (product.d.type == CUDA_R_64F)
      Batch<double>(product, a, b, c, d, batch).run();
    else
      Batch<float>(product, a, b, c, d, batch).run();
  }
}

}  // namespace cuda_double
