// Matrix products of the double against plain loops, and what it refuses.
#include <cublasLt.h>

#include <cmath>
#include <string>

#include "test_support.h"

using namespace cuda_double_test;

namespace {

template <class T>
std::vector<T> numbers(size_t count, unsigned seed) {
  std::vector<T> values(count);
  for (T& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<T>(seed >> 8) / static_cast<T>(1 << 24) - T(0.5);
  }
  return values;
}

/// The descriptors of one product, and what is needed to run it.
template <class T>
struct Lt {
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  cudaStream_t stream = make_stream();
  T alpha = 1, beta = 0;

  explicit Lt(cublasComputeType_t compute = sizeof(T) == 8 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F) {
    cublasLtCreate(&handle);
    cublasLtMatmulDescCreate(&desc, compute, type());
    cublasLtMatmulPreferenceCreate(&preference);
  }
  ~Lt() {
    cudaStreamSynchronize(stream);
    for (cublasLtMatrixLayout_t layout : {a, b, d})
      if (layout) cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatmulDescDestroy(desc);
    cublasLtDestroy(handle);
    cudaStreamDestroy(stream);
  }
  static cudaDataType type() { return sizeof(T) == 8 ? CUDA_R_64F : CUDA_R_32F; }
  static cublasLtMatrixLayout_t layout(int64_t rows, int64_t columns, int64_t leading, bool by_rows = false,
                                       int batches = 1, int64_t stride = 0) {
    cublasLtMatrixLayout_t made = nullptr;
    cublasLtOrder_t order = by_rows ? CUBLASLT_ORDER_ROW : CUBLASLT_ORDER_COL;
    cublasLtMatrixLayoutCreate(&made, type(), static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), leading);
    cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, sizeof order);
    cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batches, sizeof batches);
    cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride);
    return made;
  }
  template <class V>
  void set(cublasLtMatmulDescAttributes_t attribute, V value) {
    CHECK(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value) == CUBLAS_STATUS_SUCCESS);
  }
  std::vector<cublasLtMatmulHeuristicResult_t> find(int requested = 8) {
    std::vector<cublasLtMatmulHeuristicResult_t> results(8);
    int count = 0;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, desc, a, b, d, d, preference, requested, results.data(), &count);
    CHECK((status == CUBLAS_STATUS_SUCCESS) == (count > 0));
    results.resize(static_cast<size_t>(count));
    return results;
  }
  cublasStatus_t run(const T* a_data, const T* b_data, T* d_data, const cublasLtMatmulAlgo_t* algo = nullptr,
                     void* workspace = nullptr, size_t bytes = 0) {
    return cublasLtMatmul(handle, desc, &alpha, a_data, a, b_data, b, &beta, d_data, d, d_data, d, algo, workspace,
                          bytes, stream);
  }
};

constexpr int64_t kM = 130, kN = 5, kK = 7, kMaskLeading = 256;

/// op(A) op(B) by columns, with A and B by columns and not transposed.
template <class T>
std::vector<T> reference(const std::vector<T>& a, const std::vector<T>& b) {
  std::vector<T> product(kM * kN);
  for (int64_t j = 0; j < kN; ++j)
    for (int64_t i = 0; i < kM; ++i)
      for (int64_t p = 0; p < kK; ++p)
        product[static_cast<size_t>(i + j * kM)] +=
            a[static_cast<size_t>(i + p * kM)] * b[static_cast<size_t>(p + j * kK)];
  return product;
}

template <class T>
double distance(const std::vector<T>& a, const std::vector<T>& b) {
  double most = a.size() == b.size() ? 0 : 1e9;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) most = std::fmax(most, std::fabs(double(a[i] - b[i])));
  return most;
}

}  // namespace

TEST_CASE_TEMPLATE("products with transposes, orders, strides and scalars", T, float, double) {
  std::vector<T> a = numbers<T>(kM * kK, 1), b = numbers<T>(kK * kN, 2), expected = reference(a, b);
  for (bool transposed : {false, true})
    for (bool by_rows : {false, true}) {
      Lt<T> lt;
      // By columns the memory of A is that of its transpose by rows, so these two cases keep it.
      bool same_memory = transposed == by_rows;
      lt.a = lt.layout(transposed ? kK : kM, transposed ? kM : kK, same_memory ? kM : kK, by_rows);
      std::vector<T> a_memory = a;
      for (int64_t i = 0; i < kM && !same_memory; ++i)
        for (int64_t p = 0; p < kK; ++p) a_memory[static_cast<size_t>(p + i * kK)] = a[static_cast<size_t>(i + p * kM)];
      lt.b = lt.layout(kK, kN, kK);
      lt.d = lt.layout(kM, kN, kM);
      lt.set(CUBLASLT_MATMUL_DESC_TRANSA, transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
      lt.alpha = 2;
      lt.beta = 3;
      T* device_a = on_device(a_memory, lt.stream);
      T* device_b = on_device(b, lt.stream);
      T* device_d = on_device(std::vector<T>(kM * kN, 1), lt.stream);
      CHECK(lt.run(device_a, device_b, device_d) == CUBLAS_STATUS_SUCCESS);
      std::vector<T> scaled = expected;
      for (T& value : scaled) value = 2 * value + 3;
      CHECK(distance(on_host(device_d, kM * kN, lt.stream), scaled) < 1e-5);
      for (T* memory : {device_a, device_b, device_d}) cudaFreeAsync(memory, lt.stream);
    }
}

TEST_CASE("batches, one of them broadcast") {
  Lt<float> lt;
  lt.a = lt.layout(2, 2, 2, false, 3, 4);
  lt.b = lt.layout(2, 1, 2, false, 3, 0);
  lt.d = lt.layout(2, 1, 2, false, 3, 2);
  float* a = on_device<float>({1, 2, 3, 4, 5, 6, 7, 8, 1, 0, 0, 1}, lt.stream);
  float* b = on_device<float>({1, 10}, lt.stream);
  float* d = device_array<float>(6, lt.stream);
  CHECK(lt.run(a, b, d) == CUBLAS_STATUS_SUCCESS);
  CHECK(on_host(d, 6, lt.stream) == std::vector<float>{31, 42, 75, 86, 1, 10});
  for (float* memory : {a, b, d}) cudaFreeAsync(memory, lt.stream);
}

TEST_CASE_TEMPLATE("epilogues forward and backward", T, float, double) {
  Lt<T> lt;
  std::vector<T> a = numbers<T>(kM * kK, 1), b = numbers<T>(kK * kN, 2), bias = numbers<T>(kM, 3);
  std::vector<T> product = reference(a, b), linear = product, relu = product, gradient = product;
  for (size_t i = 0; i < linear.size(); ++i) {
    linear[i] += bias[i % kM];
    relu[i] = std::max(linear[i], T(0));
    if (linear[i] <= 0) gradient[i] = 0;
  }
  T* device_a = on_device(a, lt.stream);
  T* device_b = on_device(b, lt.stream);
  T* device_bias = on_device(bias, lt.stream);
  T* device_d = device_array<T>(kM * kN, lt.stream);
  T* sums = device_array<T>(kM, lt.stream);
  uint8_t* mask = device_array<uint8_t>(kMaskLeading * kN / 8, lt.stream);
  lt.a = lt.layout(kM, kK, kM);
  lt.b = lt.layout(kK, kN, kK);
  lt.d = lt.layout(kM, kN, kM);
  lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, mask);
  lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, kMaskLeading);
  auto result = [&](cublasLtEpilogue_t epilogue, T* bias_pointer) {
    lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    lt.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias_pointer);
    CHECK(lt.run(device_a, device_b, device_d) == CUBLAS_STATUS_SUCCESS);
    return on_host(device_d, kM * kN, lt.stream);
  };
  CHECK(distance(result(CUBLASLT_EPILOGUE_BIAS, device_bias), linear) < 1e-5);
  CHECK(distance(result(CUBLASLT_EPILOGUE_RELU_BIAS, device_bias), relu) < 1e-5);
  CHECK(distance(result(CUBLASLT_EPILOGUE_RELU_AUX_BIAS, device_bias), relu) < 1e-5);
  CHECK(distance(result(CUBLASLT_EPILOGUE_DRELU, nullptr), gradient) < 1e-5);
  CHECK(distance(result(CUBLASLT_EPILOGUE_DRELU_BGRAD, sums), gradient) < 1e-5);
  std::vector<T> of_rows(kM), of_a(kM), of_b(kN);
  for (size_t i = 0; i < gradient.size(); ++i) of_rows[i % kM] += gradient[i];
  for (size_t i = 0; i < a.size(); ++i) of_a[i % kM] += a[i];
  for (size_t i = 0; i < b.size(); ++i) of_b[i / kK] += b[i];
  CHECK(distance(on_host(sums, kM, lt.stream), of_rows) < 1e-5);
  CHECK(distance(result(CUBLASLT_EPILOGUE_BGRADA, sums), product) < 1e-5);
  CHECK(distance(on_host(sums, kM, lt.stream), of_a) < 1e-5);
  CHECK(distance(result(CUBLASLT_EPILOGUE_BGRADB, sums), product) < 1e-5);
  CHECK(distance(on_host(sums, kN, lt.stream), of_b) < 1e-5);
  CHECK(lt.find().size() == 2);
  lt.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<T*>(nullptr));
  CHECK(lt.run(device_a, device_b, device_d) == CUBLAS_STATUS_INVALID_VALUE);
  lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_RELU_AUX);
  lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t(130));
  CHECK(lt.find().empty());
  for (T* memory : {device_a, device_b, device_bias, device_d, sums}) cudaFreeAsync(memory, lt.stream);
  cudaFreeAsync(mask, lt.stream);
}

TEST_CASE("several algorithms, each for its problem, its workspace and its alignment") {
  Lt<float> lt(CUBLAS_COMPUTE_32F_FAST_TF32);
  lt.a = lt.layout(2, 2, 2);
  lt.b = lt.layout(2, 1, 2);
  lt.d = lt.layout(2, 1, 2);
  uint64_t most = 32 << 20;
  CHECK(lt.find().size() == 2);  // without a workspace
  CHECK(cublasLtMatmulPreferenceSetAttribute(lt.preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, 8) ==
        CUBLAS_STATUS_SUCCESS);
  CHECK(cublasLtMatmulPreferenceSetAttribute(lt.preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, 4) ==
        CUBLAS_STATUS_INVALID_VALUE);
  CHECK(lt.find(1).size() == 1);
  std::vector<cublasLtMatmulHeuristicResult_t> results = lt.find();
  CHECK(results.size() == 4);
  float* a = on_device<float>({1, 2, 3, 4, 0}, lt.stream);
  float* b = on_device<float>({1, 10}, lt.stream);
  float* d = device_array<float>(2, lt.stream);
  char* workspace = device_array<char>(4 << 20, lt.stream);
  for (const auto& result : results) {
    CHECK(lt.run(a, b, d, &result.algo, workspace, result.workspaceSize) == CUBLAS_STATUS_SUCCESS);
    CHECK(on_host(d, 2, lt.stream) == std::vector<float>{31, 42});
  }
  CHECK(results[1].workspaceSize > 0);
  CHECK(lt.run(a, b, d, &results[1].algo, workspace, results[1].workspaceSize - 1) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(lt.run(a + 1, b, d, &results[0].algo) == CUBLAS_STATUS_INVALID_VALUE);  // promised: 256 bytes
  lt.set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  CHECK(lt.run(a, b, d, &results[0].algo) == CUBLAS_STATUS_NOT_SUPPORTED);
  cublasOperation_t transpose = CUBLAS_OP_N;
  size_t written = 0;
  CHECK(cublasLtMatmulDescGetAttribute(lt.desc, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, 4, &written) ==
        CUBLAS_STATUS_SUCCESS);
  CHECK(transpose == CUBLAS_OP_T);
  for (float* memory : {a, b, d}) cudaFreeAsync(memory, lt.stream);
  cudaFreeAsync(workspace, lt.stream);
}

namespace {

Child refuse("refused epilogues", [] {
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  cublasLtMatrixLayout_t layout = nullptr;
  cublasLtHandle_t handle = nullptr;
  cublasLtCreate(&handle);
  cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  cublasLtMatmulPreferenceCreate(&preference);
  cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, 2, 2, 2);
  cublasLtMatmulHeuristicResult_t result = {};
  int plain = 0, fused = 0;
  auto find = [&](int* count) {
    return cublasLtMatmulAlgoGetHeuristic(handle, desc, layout, layout, layout, layout, preference, 1, &result, count);
  };
  if (find(&plain) != CUBLAS_STATUS_SUCCESS || plain != 1) return 1;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
  cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
  return find(&fused) == CUBLAS_STATUS_NOT_SUPPORTED && fused == 0 ? 0 : 2;
});

Child short_matrix("product beyond its memory", [] {
  Lt<float> lt;
  lt.a = lt.layout(2, 2, 2);
  lt.b = lt.layout(2, 2, 2);
  lt.d = lt.layout(2, 2, 2);
  float* a = device_array<float>(4, lt.stream);
  float* b = device_array<float>(3, lt.stream);
  float* d = device_array<float>(4, lt.stream);
  return int(lt.run(a, b, d));
});

}  // namespace

TEST_CASE("epilogues can be refused, and memory is checked") {
  CHECK(run_child("refused epilogues", {{"TANDEM_CUDA_DOUBLE_LT_REFUSE", "epilogues"}}).status == 0);
  CHECK(run_child("product beyond its memory").text.find("cublasLtMatmul: B: 16 bytes") != std::string::npos);
}
