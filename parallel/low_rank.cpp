#include <tandem/parallel/low_rank.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include <tandem/tensor/threads.h>

namespace tandem::parallel {
namespace {

template <class T>
bool orthonormalise_as(Tensor& a, const Tensor* spare) {
  const auto n = static_cast<std::size_t>(a.size(0)), rank = static_cast<std::size_t>(a.size(1));
  std::vector<double> columns(n * rank);
  auto dot = [&](std::size_t i, std::size_t j) {
    double total = 0;
    for (std::size_t k = 0; k < n; ++k) total += columns[i * n + k] * columns[j * n + k];
    return total;
  };
  auto take = [&](const Tensor& from, std::size_t c) {
    const T* values = from.data<T>();
    for (std::size_t k = 0; k < n; ++k) columns[c * n + k] = static_cast<double>(values[k * rank + c]);
  };
  // What is left of column c beside those before it, as a unit vector; false if that is nothing.
  auto finish = [&](std::size_t c) {
    constexpr double kNothing = 1e-12, kTiny = 1e-300;
    const double before = std::sqrt(dot(c, c));
    for (int pass = 0; pass < 2; ++pass)  // the second removes what rounding has left in the first
      for (std::size_t i = 0; i < c; ++i) {
        const double along = dot(i, c);
        for (std::size_t k = 0; k < n; ++k) columns[c * n + k] -= along * columns[i * n + k];
      }
    const double after = std::sqrt(dot(c, c));
    const bool something = after > std::max(kNothing * before, kTiny);
    const double scale = something ? 1 / after : 0;
    for (std::size_t k = 0; k < n; ++k) columns[c * n + k] *= scale;
    return something;
  };
  for (std::size_t c = 0; c < rank; ++c) {
    take(a, c);
    if (!std::isfinite(dot(c, c))) return false;
  }
  for (std::size_t c = 0; c < rank; ++c) {
    if (finish(c) || spare == nullptr) continue;
    take(*spare, c);
    (void)finish(c);
  }
  T* values = a.data<T>();
  for (std::size_t c = 0; c < rank; ++c)
    for (std::size_t k = 0; k < n; ++k) values[k * rank + c] = static_cast<T>(columns[c * n + k]);
  return true;
}

template <class T>
void replace_as(Tensor& m, Tensor* error, const Tensor& p, const Tensor& q_transposed) {
  const std::int64_t rows = m.size(0), cols = m.size(1), rank = p.size(1);
  constexpr std::int64_t kBlock = 512, kGrain = 16384;  // elements: what stays in the cache; what is worth a thread
  const T *left = p.data<T>(), *right = q_transposed.data<T>();
  T *values = m.data<T>(), *rest = error == nullptr ? nullptr : error->data<T>();
  parallel_for(rows, std::max<std::int64_t>(1, kGrain / cols), [=](std::int64_t begin, std::int64_t end) {
    T product[kBlock];
    for (std::int64_t i = begin; i < end; ++i)
      for (std::int64_t at = 0; at < cols; at += kBlock) {
        const std::int64_t n = std::min(kBlock, cols - at);
        for (std::int64_t k = 0; k < rank; ++k) {
          const T factor = left[i * rank + k], *row = right + k * cols + at;
          for (std::int64_t j = 0; j < n; ++j) product[j] = (k == 0 ? T(0) : product[j]) + factor * row[j];
        }
        T* out = values + i * cols + at;
        if (rest != nullptr)
          for (std::int64_t j = 0; j < n; ++j) rest[i * cols + at + j] = out[j] - product[j];
        std::copy_n(product, n, out);
      }
  });
}

}  // namespace

bool orthonormalise(Tensor& a, const Tensor* spare) {
  return a.dtype() == float64 ? orthonormalise_as<double>(a, spare) : orthonormalise_as<float>(a, spare);
}

void replace_by_product(Tensor& m, Tensor* error, const Tensor& p, const Tensor& q_transposed) {
  if (m.dtype() == float64) return replace_as<double>(m, error, p, q_transposed);
  replace_as<float>(m, error, p, q_transposed);
}

}  // namespace tandem::parallel
