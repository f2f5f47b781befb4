// cuBLASLt as the products use it. What it must be told about a problem, and which of its algorithms does it, is found
// out when the problem is first met, and kept.
#pragma once
#include <cublasLt.h>

#include <tandem/tensor/callable.h>
#include <tandem/tensor/cuda/runtime.h>
#include <tandem/tensor/dtype.h>

namespace tandem::cuda {

/// Throws Error with cuBLASLt's name for `status`, and what may be behind it, unless it is success.
void check_status(cublasStatus_t status, std::string_view op);

/// Whether products of float32 may round their operands to TF32, for all devices.
void set_allow_tf32(bool allow);
bool allow_tf32();

/// A matrix as cuBLASLt sees it: column-major, `ld` elements from one column to the next.
struct LtMatrix {
  void* data = nullptr;
  std::int64_t rows = 0, columns = 0, ld = 0;
  bool transposed = false;  // of an operand: that the product takes its transpose
};

/// d = epilogue(a b), of one type, float32 or float64. No size may be 0.
struct LtProduct {
  DType dtype = float32;
  LtMatrix a, b, d;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void* bias = nullptr;  // what the epilogue adds, or where it writes the bias's gradient
  void* mask = nullptr;  // bits that it writes or reads, `mask_ld` from one column to the next
  std::int64_t mask_ld = 0;
};

/// Gives the product to the calling thread's stream, or calls `in_steps`, which does the same without the epilogue, and
/// returns false: when cuBLASLt has no algorithm for it, or that has been found to be faster.
///
/// The first time, `in_steps` and up to 8 algorithms are measured on these operands and the best is kept until the
/// process ends, so results have the same bits within a process, but not from one process to the next. With
/// TANDEM_CUDA_TUNE=0, and for a problem that is first met while a graph is captured, it is the algorithm that cuBLASLt
/// ranks first.
bool multiply(Device device, const LtProduct& product, FunctionRef<void()> in_steps);

/// Before a stream of the device is destroyed, which is current: frees what products have there.
void forget_stream(int device, cudaStream_t stream);

}  // namespace tandem::cuda
