// The descriptors of cuBLASLt. An attribute that the double does not model cannot be set.
#include "cublas_lt.h"
#include "runtime.h"

namespace cuda_double {

cublasStatus_t Attributes::set(int attribute, const void* buffer, size_t size) {
  auto found = values_.find(attribute);
  if (found == values_.end())
    return reject(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLt: attribute {} is not modelled", attribute);
  if (!buffer || size != found->second.size)
    return reject(CUBLAS_STATUS_INVALID_VALUE, "cublasLt: attribute {} has {} bytes, not {}", attribute,
                  found->second.size, size);
  std::memcpy(found->second.bytes, buffer, size);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t Attributes::read(int attribute, void* buffer, size_t size, size_t* written) const {
  auto found = values_.find(attribute);
  if (found == values_.end()) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (size == 0 && !written) return CUBLAS_STATUS_INVALID_VALUE;
  if (size != 0 && (!buffer || size != found->second.size)) return CUBLAS_STATUS_INVALID_VALUE;
  if (size != 0) std::memcpy(buffer, found->second.bytes, size);
  if (written) *written = found->second.size;
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace cuda_double

using namespace cuda_double;

extern "C" {

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute, cudaDataType_t scale) {
  auto* made = new Attributes;
  made->put<int32_t>(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, compute);
  made->put<int32_t>(CUBLASLT_MATMUL_DESC_SCALE_TYPE, scale);
  made->put<int32_t>(CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_HOST);
  for (auto transpose : {CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB, CUBLASLT_MATMUL_DESC_TRANSC})
    made->put<int32_t>(transpose, CUBLAS_OP_N);
  made->put<uint32_t>(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DEFAULT);
  made->put<void*>(CUBLASLT_MATMUL_DESC_BIAS_POINTER, nullptr);
  made->put<int64_t>(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, 0);
  made->put<void*>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, nullptr);
  made->put<int64_t>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, 0);
  made->put<int64_t>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, 0);
  made->put<int32_t>(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, -1);
  made->put<int32_t>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, -1);
  made->put<int32_t>(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, 0);
  *desc = reinterpret_cast<cublasLtMatmulDesc_t>(made);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete &attributes_of(desc);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void* buffer, size_t size) {
  return attributes_of(desc).set(attribute, buffer, size);
}

cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              void* buffer, size_t size, size_t* written) {
  return attributes_of(desc).read(attribute, buffer, size, written);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t leading) {
  auto* made = new Attributes;
  made->put<uint32_t>(CUBLASLT_MATRIX_LAYOUT_TYPE, type);
  made->put<int32_t>(CUBLASLT_MATRIX_LAYOUT_ORDER, CUBLASLT_ORDER_COL);
  made->put<uint64_t>(CUBLASLT_MATRIX_LAYOUT_ROWS, rows);
  made->put<uint64_t>(CUBLASLT_MATRIX_LAYOUT_COLS, columns);
  made->put<int64_t>(CUBLASLT_MATRIX_LAYOUT_LD, leading);
  made->put<int32_t>(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, 1);
  made->put<int64_t>(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, 0);
  *layout = reinterpret_cast<cublasLtMatrixLayout_t>(made);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete &attributes_of(layout);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* buffer,
                                                size_t size) {
  return attributes_of(layout).set(attribute, buffer, size);
}

cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, void* buffer, size_t size,
                                                size_t* written) {
  return attributes_of(layout).read(attribute, buffer, size, written);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  auto* made = new Attributes;
  made->put<uint32_t>(CUBLASLT_MATMUL_PREF_SEARCH_MODE, CUBLASLT_SEARCH_BEST_FIT);
  made->put<uint64_t>(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, 0);
  made->put<uint32_t>(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_MASK);
  for (int i = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES; i <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES; ++i)
    made->put<uint32_t>(i, 256);
  made->put<float>(CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT, 0);
  *preference = reinterpret_cast<cublasLtMatmulPreference_t>(made);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete &attributes_of(preference);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* buffer,
                                                    size_t size) {
  return attributes_of(preference).set(attribute, buffer, size);
}

cublasStatus_t cublasLtMatmulPreferenceGetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, void* buffer,
                                                    size_t size, size_t* written) {
  return attributes_of(preference).read(attribute, buffer, size, written);
}

}  // extern "C"
