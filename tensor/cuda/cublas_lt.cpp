#include <tandem/tensor/cuda/cublas_lt.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <tandem/tensor/cuda/allocator.h>
#include <tandem/tensor/cuda/kernels.h>

namespace tandem::cuda {
namespace {

constexpr const char* kOp = "matmul";

std::atomic<bool> g_allow_tf32{false};

// What a choice of algorithm depends on. Pointers count by their alignment, up to that of the widest load.
struct Problem {
  DType dtype = float32;
  bool tf32 = false, transpose_a = false, transpose_b = false;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  std::int64_t m = 0, n = 0, k = 0, lda = 0, ldb = 0, ldd = 0;
  std::uint32_t align_a = 0, align_b = 0, align_d = 0, align_bias = 0;
  auto operator<=>(const Problem&) const = default;
};

// An algorithm as cuBLASLt proposes it.
using Candidate = cublasLtMatmulHeuristicResult_t;

// How a problem is solved. Kept for good, as are its descriptors.
struct Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
  std::optional<cublasLtMatmulAlgo_t> algorithm;  // none: in steps
  std::size_t workspace = 0;                      // bytes that the algorithm needs
};

// What a device has. The mutex is held while a product is given to the device, since the bias's pointer is a part of
// the plan's descriptor; recursive, since what is measured in steps contains another product.
struct DeviceState {
  std::recursive_mutex mutex;
  cublasLtHandle_t handle = nullptr;
  std::size_t max_workspace = 0;
  std::map<Problem, Plan> plans;
  std::map<cudaStream_t, void*> workspaces;  // each for one product at a time
};

DeviceState& state_of(int device) {
  static auto* const states = new std::array<DeviceState, kMaxDevices>();
  return (*states)[static_cast<std::size_t>(device)];
}

void initialise(DeviceState& state, int device) {
  if (state.handle != nullptr) return;
  int major = 0;
  check_status(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), kOp);
  state.max_workspace = std::size_t{major == 9 || major == 10 ? 32U : 4U} << 20;
  check_status(cublasLtCreate(&state.handle), kOp);
}

bool stream_captures(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_status(cudaStreamIsCapturing(stream, &status), kOp);
  return status != cudaStreamCaptureStatusNone;
}

std::uint32_t alignment(const void* data) {
  constexpr std::uintptr_t kWidest = 16;
  const auto address = reinterpret_cast<std::uintptr_t>(data) | kWidest;
  return static_cast<std::uint32_t>(address & (~address + 1));
}

Problem problem_of(const LtProduct& p) {
  return {.dtype = p.dtype,
          .tf32 = p.dtype == float32 && g_allow_tf32,
          .transpose_a = p.a.transposed,
          .transpose_b = p.b.transposed,
          .epilogue = p.epilogue,
          .m = p.d.rows,
          .n = p.d.columns,
          .k = p.a.transposed ? p.a.rows : p.a.columns,
          .lda = p.a.ld,
          .ldb = p.b.ld,
          .ldd = p.d.ld,
          .align_a = alignment(p.a.data),
          .align_b = alignment(p.b.data),
          .align_d = alignment(p.d.data),
          .align_bias = alignment(p.bias)};
}

template <class T>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check_status(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)), kOp);
}
template <class T>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  check_status(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)), kOp);
}

// What the epilogue works on.
void set_pointers(const Plan& plan, const LtProduct& p) {
  if (p.bias != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  if (p.mask != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.mask);
}

Plan describe(const Problem& problem, const LtProduct& p) {
  const cudaDataType_t type = problem.dtype == float32 ? CUDA_R_32F : CUDA_R_64F;
  const cublasComputeType_t compute = problem.dtype == float64 ? CUBLAS_COMPUTE_64F
                                      : problem.tf32           ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                               : CUBLAS_COMPUTE_32F;
  Plan plan;
  check_status(cublasLtMatmulDescCreate(&plan.operation, compute, type), kOp);
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, problem.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, problem.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, problem.epilogue);
  if (p.mask != nullptr) set(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.mask_ld);
  const auto layout = [type](cublasLtMatrixLayout_t& to, const LtMatrix& m) {
    check_status(cublasLtMatrixLayoutCreate(&to, type, static_cast<std::uint64_t>(m.rows),
                                            static_cast<std::uint64_t>(m.columns), m.ld),
                 kOp);
  };
  layout(plan.a, p.a);
  layout(plan.b, p.b);
  layout(plan.d, p.d);
  return plan;
}

// cuBLASLt's algorithms, the most promising first; none where it does not know the problem.
std::vector<Candidate> candidates(const DeviceState& state, const Problem& problem, const Plan& plan) {
  constexpr int kMost = 8;
  cublasLtMatmulPreference_t preference = nullptr;
  check_status(cublasLtMatmulPreferenceCreate(&preference), kOp);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{state.max_workspace});
  // Of those that split the inner dimension only the ones that add the parts in a step of its own, in a fixed order.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, problem.align_a);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, problem.align_b);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, problem.align_d);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, problem.align_d);
  std::vector<Candidate> results(kMost);
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(state.handle, plan.operation, plan.a, plan.b, plan.d,
                                                               plan.d, preference, kMost, results.data(), &found);
  (void)cublasLtMatmulPreferenceDestroy(preference);
  // Not every version says the same of an epilogue that it lacks.
  const bool lacking = problem.epilogue != CUBLASLT_EPILOGUE_DEFAULT && status == CUBLAS_STATUS_INVALID_VALUE;
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || lacking) return {};
  check_status(status, kOp);
  results.resize(static_cast<std::size_t>(found));
  std::erase_if(results, [](const auto& result) { return result.state != CUBLAS_STATUS_SUCCESS; });
  return results;
}

cublasStatus_t launch(const DeviceState& state, const Plan& plan, const cublasLtMatmulAlgo_t& algorithm,
                      const LtProduct& p, void* workspace, std::size_t bytes, cudaStream_t stream) {
  static constexpr float kOne = 1, kZero = 0;
  static constexpr double kOne64 = 1, kZero64 = 0;
  const bool single = p.dtype == float32;
  const void* const one = single ? static_cast<const void*>(&kOne) : &kOne64;
  const void* const zero = single ? static_cast<const void*>(&kZero) : &kZero64;
  return cublasLtMatmul(state.handle, plan.operation, one, p.a.data, plan.a, p.b.data, plan.b, zero, p.d.data, plan.d,
                        p.d.data, plan.d, &algorithm, workspace, bytes, stream);
}

// The stream's own memory for products. What is captured must not share it with what runs beside the graph.
void* workspace(DeviceState& state, Device device, cudaStream_t stream) {
  void*& memory = state.workspaces[stream];
  if (memory == nullptr) memory = allocate_workspace(device, state.max_workspace);
  return memory;
}

class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {
    for (cudaEvent_t* event : {&begin_, &end_}) check_status(cudaEventCreateWithFlags(event, cudaEventDefault), kOp);
  }
  ~Stopwatch() {
    (void)cudaEventDestroy(begin_);
    (void)cudaEventDestroy(end_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  /// Milliseconds of three runs on the stream.
  float time(FunctionRef<void()> run) {
    check_status(cudaEventRecord(begin_, stream_), kOp);
    for (int i = 0; i < 3; ++i) run();
    check_status(cudaEventRecord(end_, stream_), kOp);
    check_status(cudaEventSynchronize(end_), kOp);
    float milliseconds = 0;
    check_status(cudaEventElapsedTime(&milliseconds, begin_, end_), kOp);
    return milliseconds;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// The fastest of the algorithms on these operands, whose product is written again and again; null when it is faster in
// steps. What comes later must be clearly faster, so that noise does not choose.
const Candidate* fastest(DeviceState& state, const Plan& plan, const std::vector<Candidate>& found, const LtProduct& p,
                         Device device, cudaStream_t stream, FunctionRef<void()> in_steps) {
  constexpr float kClearly = 0.95F;
  void* const memory = workspace(state, device, stream);
  const Candidate* best = nullptr;
  float best_time = std::numeric_limits<float>::infinity();
  Stopwatch watch(stream);
  for (const Candidate& candidate : found) {
    const auto run = [&] { return launch(state, plan, candidate.algo, p, memory, state.max_workspace, stream); };
    if (run() != CUBLAS_STATUS_SUCCESS) continue;  // the first run also loads the kernel
    const float time = watch.time([&] { check_status(run(), kOp); });
    if (best != nullptr && time >= best_time * kClearly) continue;
    best = &candidate;
    best_time = time;
  }
  if (best == nullptr || p.epilogue == CUBLASLT_EPILOGUE_DEFAULT) return best;
  in_steps();
  return watch.time(in_steps) < best_time * kClearly ? nullptr : best;
}

Plan make_plan(DeviceState& state, const Problem& problem, const LtProduct& p, Device device, cudaStream_t stream,
               FunctionRef<void()> in_steps) {
  static const bool tune = [] {
    const char* const value = std::getenv("TANDEM_CUDA_TUNE");
    return value == nullptr || std::string_view(value) != "0";
  }();
  Plan plan = describe(problem, p);
  set_pointers(plan, p);
  const std::vector<Candidate> found = candidates(state, problem, plan);
  if (found.empty()) return plan;
  const bool alternatives = found.size() > 1 || p.epilogue != CUBLASLT_EPILOGUE_DEFAULT;
  const bool measure = tune && alternatives && !stream_captures(stream);
  const Candidate* const chosen = measure ? fastest(state, plan, found, p, device, stream, in_steps) : &found.front();
  if (chosen == nullptr) return plan;
  plan.algorithm = chosen->algo;
  plan.workspace = chosen->workspaceSize;
  return plan;
}

// Whether cuBLASLt was given the product.
bool launched(Device device, const LtProduct& product, FunctionRef<void()> in_steps) {
  const cudaStream_t stream = use(device);
  DeviceState& state = state_of(device.index());
  const Problem problem = problem_of(product);
  std::lock_guard lock(state.mutex);
  initialise(state, device.index());
  auto found = state.plans.find(problem);
  if (found == state.plans.end())
    found = state.plans.emplace(problem, make_plan(state, problem, product, device, stream, in_steps)).first;
  const Plan& plan = found->second;
  if (!plan.algorithm) return false;
  set_pointers(plan, product);
  std::optional<Scratch> captured;
  if (plan.workspace > 0 && stream_captures(stream)) captured.emplace(device, plan.workspace);
  void* const memory = captured ? captured->data() : plan.workspace > 0 ? workspace(state, device, stream) : nullptr;
  check_status(launch(state, plan, *plan.algorithm, product, memory, plan.workspace, stream), kOp);
  return true;
}

}  // namespace

void check_status(cublasStatus_t status, std::string_view op) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const char* hint = "this is an error in Tandem or in cuBLASLt";
  if (status == CUBLAS_STATUS_NOT_INITIALIZED || status == CUBLAS_STATUS_ALLOC_FAILED)
    hint = "cuBLASLt found too little memory on the device or the host; use a smaller batch or model";
  else if (status == CUBLAS_STATUS_ARCH_MISMATCH)
    hint = "this version of cuBLASLt does not know the device";
  else if (status == CUBLAS_STATUS_EXECUTION_FAILED)
    hint = "an error of a kernel may come from an earlier operation";
  fail(op, "cuBLASLt failed: {}; {}", cublasLtGetStatusName(status), hint);
}

void set_allow_tf32(bool allow) { g_allow_tf32 = allow; }
bool allow_tf32() { return g_allow_tf32; }

bool multiply(Device device, const LtProduct& product, FunctionRef<void()> in_steps) {
  if (launched(device, product, in_steps)) return true;
  in_steps();
  return false;
}

// A later stream may get this one's handle, but not memory that this one's products still use.
void forget_stream(int device, cudaStream_t stream) {
  DeviceState& state = state_of(device);
  std::lock_guard lock(state.mutex);
  const auto found = state.workspaces.find(stream);
  if (found == state.workspaces.end()) return;
  if (found->second != nullptr) release_workspace(device, found->second, state.max_workspace, stream);
  state.workspaces.erase(found);
}

}  // namespace tandem::cuda
