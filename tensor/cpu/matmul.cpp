// Matrix products: oneDNN where it is built in and the type is float32, else Eigen.
#include <Eigen/Core>
#include <algorithm>
#include <cstring>

#include <tandem/tensor/cpu/kernels.h>
#include <tandem/tensor/cpu/loops.h>
#include <tandem/tensor/cpu/onednn.h>
#include <tandem/tensor/dispatch.h>

namespace tandem::cpu {
namespace {

// A matrix with one unit stride: row-major, or column-major when `transposed`.
struct Matrix {
  bool transposed;
  std::int64_t ld;  // distance between rows (columns when transposed), in elements
};
Matrix layout(const View& v) {
  if (v.strides[1] == 1 || v.shape[1] == 1) return {false, std::max(v.strides[0], v.shape[1])};
  return {true, std::max(v.strides[1], v.shape[0])};
}

View transpose(View v) {
  std::swap(v.shape[0], v.shape[1]);
  std::swap(v.strides[0], v.strides[1]);
  return v;
}

template <class T>
void eigen_matmul(const View& a, const View& b, const View& c) {
  using RowMajor = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using ColMajor = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::ColMajor>;
  using Stride = Eigen::OuterStride<>;
#if defined(_OPENMP)
  // A setting of the whole process: written only when it changes, since other devices' threads read it.
  if (const int threads = threads_per_device(); Eigen::nbThreads() != threads) Eigen::setNbThreads(threads);
#endif
  Eigen::Map<RowMajor, 0, Stride> out(c.ptr<T>(), c.shape[0], c.shape[1], Stride(layout(c).ld));
  auto multiply = [&](const auto& left) {
    const Matrix mb = layout(b);
    if (mb.transposed) {
      out.noalias() = left * Eigen::Map<const ColMajor, 0, Stride>(b.ptr<T>(), b.shape[0], b.shape[1], Stride(mb.ld));
    } else {
      out.noalias() = left * Eigen::Map<const RowMajor, 0, Stride>(b.ptr<T>(), b.shape[0], b.shape[1], Stride(mb.ld));
    }
  };
  const Matrix ma = layout(a);
  if (ma.transposed)
    multiply(Eigen::Map<const ColMajor, 0, Stride>(a.ptr<T>(), a.shape[0], a.shape[1], Stride(ma.ld)));
  else
    multiply(Eigen::Map<const RowMajor, 0, Stride>(a.ptr<T>(), a.shape[0], a.shape[1], Stride(ma.ld)));
}

template <class T>
TANDEM_CLONES void bias_relu_rows(std::int64_t n, const T* bias, bool relu, T* y) {
  if (bias != nullptr)
    for (std::int64_t j = 0; j < n; ++j) y[j] += bias[j];
  if (relu)
    for (std::int64_t j = 0; j < n; ++j) y[j] = y[j] < T(0) ? T(0) : y[j];
}

// Sums of the columns of g where y > 0 (everywhere without y), in blocks of rows; dz receives the masked rows.
template <class T, bool Masked>
TANDEM_CLONES void bias_relu_grad_columns(std::int64_t rows, std::int64_t columns, const T* g, const T* y, T* dz,
                                          std::int64_t row_size, T* db) {
  constexpr std::int64_t kRows = 64, kColumns = 256;
  T acc[kColumns];
  for (std::int64_t j = 0; j < columns; ++j) db[j] = T(0);
  for (std::int64_t r0 = 0; r0 < rows; r0 += kRows) {
    for (std::int64_t j = 0; j < columns; ++j) acc[j] = T(0);
    for (std::int64_t r = r0; r < std::min(rows, r0 + kRows); ++r) {
      const T* gr = g + r * row_size;
      if constexpr (Masked) {
        const T* yr = y + r * row_size;
        T* dr = dz + r * row_size;
#pragma omp simd
        for (std::int64_t j = 0; j < columns; ++j) {
          const T v = yr[j] <= T(0) ? T(0) : gr[j];
          dr[j] = v;
          acc[j] += v;
        }
      } else {
#pragma omp simd
        for (std::int64_t j = 0; j < columns; ++j) acc[j] += gr[j];
      }
    }
    for (std::int64_t j = 0; j < columns; ++j) db[j] += acc[j];
  }
}

}  // namespace

void matmul(const View& a, const View& b, const View& c) {
  if (c.shape[0] == 0 || c.shape[1] == 0) return;
  if (a.shape[1] == 0) return fill(c, 0);
  if (kHasOneDnn && c.dtype == float32) {
    const Matrix ma = layout(a), mb = layout(b);
    onednn::sgemm(ma.transposed, mb.transposed, c.shape[0], c.shape[1], a.shape[1], a.ptr<float>(), ma.ld,
                  b.ptr<float>(), mb.ld, c.ptr<float>(), layout(c).ld);
    return;
  }
  dispatch_real("matmul", c.dtype, [&]<class T>() { eigen_matmul<T>(a, b, c); });
}

void linear(const View& x, const View& w, const View& bias, bool relu, const View& y) {
  // The matmul primitive with its post-operations wins from 32 rows on, sgemm and a pass over the rows below.
  constexpr std::int64_t kPrimitiveRows = 32;
  if (kHasOneDnn && y.dtype == float32 && y.shape[0] >= kPrimitiveRows && y.shape[1] > 0 && w.shape[1] > 0 &&
      x.contiguous() && w.contiguous()) {
    onednn::linear(y.shape[0], w.shape[1], y.shape[1], x.ptr<float>(), w.ptr<float>(), bias.ptr<float>(), relu,
                   y.ptr<float>());
    return;
  }
  matmul(x, transpose(w), y);
  if (bias.data == nullptr && !relu) return;
  dispatch_real("linear", y.dtype, [&]<class T>() {
    const std::int64_t n = y.shape[1];
    parallel_for(y.shape[0], std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, n)),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t r = begin; r < end; ++r)
                     bias_relu_rows<T>(n, bias.ptr<const T>(), relu, y.ptr<T>() + r * n);
                 });
  });
}

void bias_relu_grad(const View& g, const View& y, const View& dz, const View& db) {
  dispatch_real("linear", g.dtype, [&]<class T>() {
    const std::int64_t rows = g.shape[0], columns = g.shape[1];
    constexpr std::int64_t kColumns = 256;  // split by columns: no thread count changes a sum
    const std::int64_t pieces = (columns + kColumns - 1) / kColumns;
    parallel_for(pieces, std::max<std::int64_t>(1, kGrain / (kColumns * std::max<std::int64_t>(1, rows))),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t p = begin; p < end; ++p) {
                     const std::int64_t j = p * kColumns, n = std::min(kColumns, columns - j);
                     const T* gp = g.ptr<T>() + j;
                     if (y.data != nullptr)
                       bias_relu_grad_columns<T, true>(rows, n, gp, y.ptr<T>() + j, dz.ptr<T>() + j, columns,
                                                       db.ptr<T>() + j);
                     else
                       bias_relu_grad_columns<T, false>(rows, n, gp, nullptr, nullptr, columns, db.ptr<T>() + j);
                   }
                 });
  });
}

void linear_weight_grad(const View& g, const View& x, const View& dw, const View& db) {
  bias_relu_grad(g, {}, {}, db);
  matmul(transpose(g), x, dw);
}

}  // namespace tandem::cpu
