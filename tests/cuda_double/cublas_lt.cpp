// cuBLASLt: the choice of an algorithm and the product itself. An algorithm is only good for the problem that it was
// found for, with the alignment and the workspace that were promised. With TANDEM_CUDA_DOUBLE_LT_REFUSE=epilogues no
// epilogue is supported. What it cannot catch: combinations that the real library refuses, precision, and speed: times
// of algorithms mean nothing, but there are several to choose from.
#include "cublas_lt.h"

#include <optional>

#include "device_memory.h"
#include "runtime.h"
#include "stream.h"

struct cublasLtContext {
  int device = 0;
};

namespace cuda_double {
namespace {

constexpr uint64_t kMagic = 0x7a6f6d656c74616c;

struct Algorithm {
  uint64_t magic, id, workspace, problem, alignments[4];
};
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));

Matrix matrix_of(cublasLtMatrixLayout_t layout) {
  const Attributes& from = attributes_of(layout);
  Matrix matrix;
  matrix.type = static_cast<int>(from.get<uint32_t>(CUBLASLT_MATRIX_LAYOUT_TYPE));
  matrix.order = from.get<int32_t>(CUBLASLT_MATRIX_LAYOUT_ORDER);
  matrix.batches = from.get<int32_t>(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
  matrix.rows = from.get<int64_t>(CUBLASLT_MATRIX_LAYOUT_ROWS);
  matrix.columns = from.get<int64_t>(CUBLASLT_MATRIX_LAYOUT_COLS);
  matrix.leading = from.get<int64_t>(CUBLASLT_MATRIX_LAYOUT_LD);
  matrix.stride = from.get<int64_t>(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);
  return matrix;
}

Product product_of(cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                   cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d) {
  const Attributes& from = attributes_of(desc);
  Product product = {matrix_of(a), matrix_of(b), matrix_of(c), matrix_of(d)};
  product.transpose_a = from.get<int32_t>(CUBLASLT_MATMUL_DESC_TRANSA) != CUBLAS_OP_N;
  product.transpose_b = from.get<int32_t>(CUBLASLT_MATMUL_DESC_TRANSB) != CUBLAS_OP_N;
  product.m = product.d.rows;
  product.n = product.d.columns;
  product.k = product.transpose_a ? product.a.rows : product.a.columns;
  product.epilogue = from.get<uint32_t>(CUBLASLT_MATMUL_DESC_EPILOGUE);
  product.bias = from.get<void*>(CUBLASLT_MATMUL_DESC_BIAS_POINTER);
  product.bias_stride = from.get<int64_t>(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE);
  product.mask = product.uses_mask() ? from.get<uint8_t*>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER) : nullptr;
  product.mask_leading = from.get<int64_t>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
  product.mask_stride = from.get<int64_t>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE);
  return product;
}

cublasStatus_t check_types(const Attributes& desc, const Product& product) {
  int type = product.d.type, compute = desc.get<int32_t>(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE);
  for (const Matrix* matrix : {&product.a, &product.b, &product.c})
    if (matrix->type != type) return reject(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLt: matrices of different types");
  bool is_float = type == CUDA_R_32F && (compute == CUBLAS_COMPUTE_32F || compute == CUBLAS_COMPUTE_32F_PEDANTIC ||
                                         compute == CUBLAS_COMPUTE_32F_FAST_TF32);
  bool is_double = type == CUDA_R_64F && (compute == CUBLAS_COMPUTE_64F || compute == CUBLAS_COMPUTE_64F_PEDANTIC);
  if ((is_float || is_double) && desc.get<int32_t>(CUBLASLT_MATMUL_DESC_SCALE_TYPE) == type)
    return CUBLAS_STATUS_SUCCESS;
  return reject(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLt: type {} with compute type {} is not modelled", type, compute);
}

cublasStatus_t check_shapes(const Product& product) {
  auto is = [](const Matrix& matrix, bool transposed, int64_t rows, int64_t columns) {
    return transposed ? matrix.rows == columns && matrix.columns == rows
                      : matrix.rows == rows && matrix.columns == columns;
  };
  if (product.m < 1 || product.n < 1 || product.k < 1)
    return reject(CUBLAS_STATUS_INVALID_VALUE, "cublasLt: an empty product");
  if (!is(product.a, product.transpose_a, product.m, product.k) ||
      !is(product.b, product.transpose_b, product.k, product.n) || !is(product.c, false, product.m, product.n))
    return reject(CUBLAS_STATUS_INVALID_VALUE, "cublasLt: the shapes of a product {} x {} x {} do not fit", product.m,
                  product.n, product.k);
  for (const Matrix* matrix : {&product.a, &product.b, &product.c, &product.d}) {
    bool by_rows = matrix->order == CUBLASLT_ORDER_ROW;
    if (!by_rows && matrix->order != CUBLASLT_ORDER_COL)
      return reject(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLt: order {}", matrix->order);
    if (matrix->leading < (by_rows ? matrix->columns : matrix->rows))
      return reject(CUBLAS_STATUS_INVALID_VALUE, "cublasLt: the leading dimension {} is too small", matrix->leading);
    if (matrix->batches != product.d.batches || matrix->batches < 1)
      return reject(CUBLAS_STATUS_INVALID_VALUE, "cublasLt: the numbers of batches differ");
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_epilogue(const Product& product) {
  switch (product.epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
      return CUBLAS_STATUS_SUCCESS;
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_RELU:
    case CUBLASLT_EPILOGUE_RELU_BIAS:
    case CUBLASLT_EPILOGUE_RELU_AUX:
    case CUBLASLT_EPILOGUE_RELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_DRELU:
      break;
    case CUBLASLT_EPILOGUE_DRELU_BGRAD:
    case CUBLASLT_EPILOGUE_BGRADA:
    case CUBLASLT_EPILOGUE_BGRADB:
      if (product.d.batches > 1) return CUBLAS_STATUS_NOT_SUPPORTED;
      break;
    default:
      return reject(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLt: epilogue {} is not modelled", product.epilogue);
  }
  static const bool refuses = variable("TANDEM_CUDA_DOUBLE_LT_REFUSE", "") == "epilogues";
  if (refuses || product.d.order != CUBLASLT_ORDER_COL) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (product.uses_mask() && (product.mask_leading < product.m || product.mask_leading % 128 != 0))
    return reject(CUBLAS_STATUS_INVALID_VALUE, "cublasLt: the mask has a leading dimension of {} bits for {} rows",
                  product.mask_leading, product.m);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_product(const Attributes& desc, const Product& product) {
  if (desc.get<int32_t>(CUBLASLT_MATMUL_DESC_POINTER_MODE) != CUBLASLT_POINTER_MODE_HOST ||
      desc.get<int32_t>(CUBLASLT_MATMUL_DESC_TRANSC) != CUBLAS_OP_N)
    return reject(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLt: scalars on the device or a transposed C are not modelled");
  if (cublasStatus_t status = check_types(desc, product)) return status;
  if (cublasStatus_t status = check_shapes(product)) return status;
  return check_epilogue(product);
}

/// What an algorithm was chosen for.
uint64_t fingerprint(const Product& product) {
  uint64_t hash = kMagic;
  auto mix = [&hash](int64_t value) { hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001b3; };
  for (const Matrix* matrix : {&product.a, &product.b, &product.c, &product.d})
    for (int64_t value : {int64_t(matrix->type), int64_t(matrix->order), int64_t(matrix->batches), matrix->rows,
                          matrix->columns, matrix->leading, matrix->stride})
      mix(value);
  mix(product.transpose_a);
  mix(product.transpose_b);
  mix(product.epilogue);
  return hash;
}

cublasStatus_t check_algorithm(const Algorithm& algorithm, const Product& product, const void* const pointers[4],
                               size_t workspace_bytes) {
  if (algorithm.magic != kMagic || algorithm.problem != fingerprint(product))
    return reject(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmul: the algorithm was found for another problem");
  if (workspace_bytes < algorithm.workspace)
    return reject(CUBLAS_STATUS_INVALID_VALUE, "cublasLtMatmul: the algorithm needs a workspace of {} bytes, it got {}",
                  algorithm.workspace, workspace_bytes);
  for (int i = 0; i < 4; ++i)
    if (reinterpret_cast<uintptr_t>(pointers[i]) % algorithm.alignments[i] != 0)
      return reject(CUBLAS_STATUS_INVALID_VALUE,
                    "cublasLtMatmul: matrix {} is not aligned to {} bytes, as the preference promised", "ABCD"[i],
                    algorithm.alignments[i]);
  return CUBLAS_STATUS_SUCCESS;
}

bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  auto* first = static_cast<const char*>(a);
  auto* second = static_cast<const char*>(b);
  return first < second + b_bytes && second < first + a_bytes;
}

/// Dies for pointers that leave their allocations or belong to another device, or inputs that the output would destroy.
cublasStatus_t check_pointers(const Product& product, const void* a, const void* b, const void* c, void* d,
                              int device) {
  require_range(a, product.a.bytes(), device, "cublasLtMatmul: A");
  require_range(b, product.b.bytes(), device, "cublasLtMatmul: B");
  require_range(d, product.d.bytes(), device, "cublasLtMatmul: D");
  if (product.beta != 0) require_range(c, product.c.bytes(), device, "cublasLtMatmul: C");
  if (overlap(a, product.a.bytes(), d, product.d.bytes()) || overlap(b, product.b.bytes(), d, product.d.bytes()))
    die("cublasLtMatmul: D overlaps an input");
  if (product.bias_size() > 0) {
    if (!product.bias) return reject(CUBLAS_STATUS_INVALID_VALUE, "cublasLtMatmul: the epilogue needs a bias pointer");
    auto elements = static_cast<size_t>(product.bias_size() + (product.d.batches - 1) * product.bias_stride);
    require_range(product.bias, elements * product.d.width(), device, "cublasLtMatmul: bias");
  }
  if (product.uses_mask()) {
    if (!product.mask) return reject(CUBLAS_STATUS_INVALID_VALUE, "cublasLtMatmul: the epilogue needs a mask pointer");
    require_range(product.mask, product.mask_bytes(), device, "cublasLtMatmul: mask");
  }
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace
}  // namespace cuda_double

using namespace cuda_double;

extern "C" {

size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
size_t cublasLtGetCudartVersion() { return CUDART_VERSION; }

const char* cublasLtGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
  }
}

const char* cublasLtGetStatusString(cublasStatus_t status) { return cublasLtGetStatusName(status); }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  if (availability() != cudaSuccess) return CUBLAS_STATUS_NOT_INITIALIZED;
  *handle = new cublasLtContext{current_device()};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                              int requested, cublasLtMatmulHeuristicResult_t results[], int* found) {
  constexpr uint64_t kWorkspaces[] = {0, uint64_t(4) << 20, uint64_t(1) << 16, 0};
  *found = 0;
  if (requested < 1) return CUBLAS_STATUS_INVALID_VALUE;
  Product product = product_of(desc, a, b, c, d);
  if (cublasStatus_t status = check_product(attributes_of(desc), product)) return status;
  const Attributes& wish = attributes_of(preference);
  for (uint64_t id = 0; id < std::size(kWorkspaces) && *found < requested; ++id) {
    if (kWorkspaces[id] > wish.get<uint64_t>(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)) continue;
    Algorithm algorithm = {kMagic, id, kWorkspaces[id], fingerprint(product), {}};
    for (int i = 0; i < 4; ++i)
      algorithm.alignments[i] = wish.get<uint32_t>(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES + i);
    cublasLtMatmulHeuristicResult_t& result = results[(*found)++] = {};
    std::memcpy(&result.algo, &algorithm, sizeof algorithm);
    result.workspaceSize = algorithm.workspace;
    result.state = CUBLAS_STATUS_SUCCESS;
    result.wavesCount = 1;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  require_explicit(stream, "cublasLtMatmul");
  if (availability() != cudaSuccess) return CUBLAS_STATUS_EXECUTION_FAILED;
  if (handle->device != current_device() || stream->device != current_device())
    return reject(CUBLAS_STATUS_INVALID_VALUE, "cublasLtMatmul: handle of device {}, stream of {}, current is {}",
                  handle->device, stream->device, current_device());
  Product product = product_of(desc, a_layout, b_layout, c_layout, d_layout);
  if (cublasStatus_t status = check_product(attributes_of(desc), product)) return status;
  bool is_double = product.d.type == CUDA_R_64F;
  product.alpha = is_double ? *static_cast<const double*>(alpha) : *static_cast<const float*>(alpha);
  product.beta = is_double ? *static_cast<const double*>(beta) : *static_cast<const float*>(beta);
  if (workspace_bytes > 0) require_range(workspace, workspace_bytes, handle->device, "cublasLtMatmul: workspace");
  size_t scratch = 0;
  if (algo) {
    Algorithm algorithm = {};
    std::memcpy(&algorithm, algo, sizeof algorithm);
    const void* pointers[] = {a, b, product.beta == 0 ? nullptr : c, d};
    if (cublasStatus_t status = check_algorithm(algorithm, product, pointers, workspace_bytes)) return status;
    scratch = algorithm.workspace;
  }
  if (cublasStatus_t status = check_pointers(product, a, b, c, d, handle->device)) return status;
  cudaError_t error = enqueue(stream, [product, a, b, c, d, workspace, scratch] {
    // Two products that use one workspace at once are a race, as on a device.
    if (scratch > 0) std::memset(workspace, 0xff, std::min<size_t>(scratch, 4096));
    compute(product, a, b, c, d);
  });
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // extern "C"
