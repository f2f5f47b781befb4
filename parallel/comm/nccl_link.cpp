// The module libtandem_nccl.so: collectives by NCCL. It takes nothing from libtandem but headers.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstring>
#include <map>

#include <fmt/format.h>

#include <tandem/parallel/comm/nccl_module.h>
#include <tandem/tensor/error.h>

namespace tandem::parallel {
namespace {

constexpr const char* kOp = "nccl";

void check_cuda(cudaError_t status) {
  check(status == cudaSuccess, kOp, "CUDA failed: {} ({})", cudaGetErrorString(status), cudaGetErrorName(status));
}

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return ncclFloat32;
    case DType::float64:
      return ncclFloat64;
    case DType::int64:
      return ncclInt64;
    case DType::int32:
      return ncclInt32;
    case DType::float16:
      return ncclFloat16;
    case DType::bfloat16:
      return ncclBfloat16;
    default:
      return ncclUint8;  // bool, too: 0 or 1
  }
}

ncclRedOp_t op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::product:
      return ncclProd;
    case ReduceOp::min:
      return ncclMin;
    case ReduceOp::max:
      return ncclMax;
    case ReduceOp::avg:
      return ncclAvg;
    default:
      return ncclSum;
  }
}

class Link final : public NcclLink {
 public:
  Link(int device, int rank, int size) : device_(device), rank_(rank), size_(size) {}

  std::string new_id() override {
    use_device();
    ncclUniqueId id{};
    expect(ncclGetUniqueId(&id));
    return {id.internal, sizeof id.internal};
  }

  void begin_connect(const std::string& text) override {
    use_device();
    ncclUniqueId id{};
    check(text.size() == sizeof id.internal, kOp, "the id to connect by has {} bytes", text.size());
    std::memcpy(id.internal, text.data(), sizeof id.internal);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;  // so that it can be aborted at any time
    expect(ncclCommInitRankConfig(&comm_, size_, id, rank_, &config));
  }

  bool poll() override {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t status = ncclCommGetAsyncError(comm_, &state);
    expect(status == ncclSuccess ? state : status);
    return state != ncclInProgress;
  }

  void begin(const NcclCall& call, void* on) override;

  void* allocate(std::size_t bytes) override {
    use_device();
    void* memory = nullptr;
    expect(ncclMemAlloc(&memory, bytes));
    return memory;
  }
  void begin_share(void* memory, std::size_t bytes) override {
    (void)ncclCommWindowRegister(comm_, memory, bytes, &shared_[memory].window, NCCL_WIN_COLL_SYMMETRIC);
  }
  // Where devices cannot reach each other's memory, NCCL may still know it. If not, it copies.
  void end_share(void* memory, std::size_t bytes) override {
    Shared& shared = shared_[memory];
    if (shared.window == nullptr && ncclCommRegister(comm_, memory, bytes, &shared.handle) != ncclSuccess)
      shared.handle = nullptr;
  }
  void unshare(void* memory) override {
    use_device();
    const auto found = shared_.find(memory);
    if (found == shared_.end()) return;
    if (found->second.window != nullptr) (void)ncclCommWindowDeregister(comm_, found->second.window);
    if (found->second.handle != nullptr) (void)ncclCommDeregister(comm_, found->second.handle);
    shared_.erase(found);
  }

  void begin_finalize() override {
    use_device();
    expect(ncclCommFinalize(comm_));
  }
  void destroy() override {
    if (comm_ != nullptr) (void)ncclCommDestroy(comm_);
    comm_ = nullptr;
  }
  void abort() override {
    use_device();
    if (comm_ != nullptr) (void)ncclCommAbort(comm_);
    comm_ = nullptr;
  }

 private:
  struct Shared {
    ncclWindow_t window = nullptr;
    void* handle = nullptr;
  };
  void use_device() const { check_cuda(cudaSetDevice(device_)); }
  void expect(ncclResult_t status) const {
    if (status == ncclSuccess || status == ncclInProgress) return;
    const char* const more = comm_ == nullptr ? ncclGetLastError(nullptr) : ncclGetLastError(comm_);
    fail(kOp, "NCCL failed: {}{}{}", ncclGetErrorString(status), more == nullptr || *more == 0 ? "" : ": ",
         more == nullptr ? "" : more);
  }

  const int device_, rank_, size_;
  ncclComm_t comm_ = nullptr;
  std::map<void*, Shared> shared_;
};

void Link::begin(const NcclCall& call, void* on) {
  use_device();
  auto* const stream = static_cast<cudaStream_t>(on);
  const ncclDataType_t type = type_of(call.dtype);
  const ncclRedOp_t op = op_of(call.op);
  const auto count = static_cast<std::size_t>(call.count);
  const std::size_t bytes = count * size_of(call.dtype);
  const auto* const input = static_cast<const char*>(call.input);
  auto* const output = static_cast<char*>(call.output);
  const auto own_part = [&](const void* from, void* to) {
    if (from != to) check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
  };
  ncclResult_t worst = ncclSuccess;  // of what must come to its ncclGroupEnd
  const auto note = [&](ncclResult_t status) {
    if (worst == ncclSuccess || worst == ncclInProgress) worst = status;
  };
  const auto send = [&](const void* from, int to) { note(ncclSend(from, count, type, to, comm_, stream)); };
  const auto receive = [&](void* to, int from) { note(ncclRecv(to, count, type, from, comm_, stream)); };
  const auto part = [&](auto* whole, int r) { return whole + bytes * static_cast<std::size_t>(r); };
  switch (call.operation) {
    case Operation::all_reduce:
      return expect(ncclAllReduce(input, output, count, type, op, comm_, stream));
    case Operation::broadcast: {  // in place
      void* const data = rank_ == call.root ? const_cast<char*>(input) : output;
      return expect(ncclBroadcast(data, data, count, type, call.root, comm_, stream));
    }
    case Operation::reduce:
      return expect(ncclReduce(input, output, count, type, op, call.root, comm_, stream));
    case Operation::all_gather:
      return expect(ncclAllGather(input, output, count, type, comm_, stream));
    case Operation::reduce_scatter:
      return expect(ncclReduceScatter(input, output, count, type, op, comm_, stream));
    case Operation::gather:
    case Operation::scatter:
    case Operation::all_to_all:
      break;
    default:
      fail(kOp, "operation {} does not go from GPU to GPU", static_cast<int>(call.operation));
  }
  expect(ncclGroupStart());
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const bool to_root = r == call.root, root = rank_ == call.root;
    if (call.operation == Operation::all_to_all) {
      send(part(input, r), r);
      receive(part(output, r), r);
    } else if (call.operation == Operation::gather) {
      if (to_root) send(input, r);
      if (root) receive(part(output, r), r);
    } else {
      if (root) send(part(input, r), r);
      if (to_root) receive(output, r);
    }
  }
  note(ncclGroupEnd());
  expect(worst);
  if (call.operation == Operation::all_to_all) return own_part(part(input, rank_), part(output, rank_));
  if (rank_ != call.root) return;
  if (call.operation == Operation::gather)
    own_part(input, part(output, rank_));
  else
    own_part(part(input, rank_), output);
}

NcclLink* make_link(int device, int rank, int size) { return new Link(device, rank, size); }

void release(int device, void* memory) {
  if (cudaSetDevice(device) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess) (void)ncclMemFree(memory);
}

const NcclTable kTable = {.make_link = make_link, .release = release};

}  // namespace
}  // namespace tandem::parallel

extern "C" __attribute__((visibility("default"))) const tandem::parallel::NcclTable* tandem_make_nccl_link_1() {
  return &tandem::parallel::kTable;
}
