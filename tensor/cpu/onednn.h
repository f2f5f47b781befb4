// The few calls of oneDNN that the CPU backend makes. Without oneDNN kHasOneDnn is false and nothing here is called.
#pragma once
#include <cstdint>

namespace tandem::cpu {

#if defined(TANDEM_ONEDNN)
inline constexpr bool kHasOneDnn = true;
#else
inline constexpr bool kHasOneDnn = false;
#endif

namespace onednn {

/// c {m, n} = op(a) op(b), row-major, leading dimensions in elements.
void sgemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, const float* a,
           std::int64_t lda, const float* b, std::int64_t ldb, float* c, std::int64_t ldc);
/// y {rows, out} = x {rows, in} w^T {in, out} (+ bias, may be null) (then ReLU), all dense.
void linear(std::int64_t rows, std::int64_t in, std::int64_t out, const float* x, const float* w, const float* bias,
            bool relu, float* y);

}  // namespace onednn
}  // namespace tandem::cpu
