// Communicators of NCCL: their start, their end, their errors, and registered memory. A communicator that does not
// block answers ncclInProgress, and does what it was told only while its state is asked for: who records an event
// before that misses the operation, as with a real one. A dead rank leaves the others waiting until they abort.
#include <unistd.h>

#include <climits>
#include <functional>
#include <mutex>
#include <string>

#include "device_memory.h"
#include "nccl_comm.h"
#include "runtime.h"

namespace cuda_double {
namespace {

thread_local std::string last_text;

std::mutex registered_mutex;
std::multimap<const char*, size_t>& registered() {  // by any communicator
  static auto* all = new std::multimap<const char*, size_t>;
  return *all;
}

/// Destroyed communicators stay reachable: work that comes late may still look at them.
void keep(ncclComm_t comm) {
  static std::mutex mutex;
  static auto* all = new std::vector<ncclComm_t>;
  std::lock_guard lock(mutex);
  all->push_back(comm);
}

uint64_t host_number() {
  char name[HOST_NAME_MAX + 1] = {};
  gethostname(name, HOST_NAME_MAX);
  return std::hash<std::string>()(variable("NCCL_HOSTID", name));
}

void wait_for_operations(ncclComm_t comm) {
  while (uint32_t seen = comm->outstanding.load(std::memory_order_acquire)) futex_wait(comm->outstanding, seen);
}

/// The state of a communicator that does not block goes on with each question.
ncclResult_t proceed(ncclComm_t comm) {
  if (comm->state != ncclInProgress || comm->pending.empty() || ++comm->questions < 2) return comm->state;
  comm->state = enqueue_operations(comm, std::exchange(comm->pending, {}));
  return comm->state;
}

ncclResult_t register_memory(ncclComm_t comm, void* memory, size_t bytes, bool is_symmetric, void** handle,
                             const char* name) {
  if (ncclResult_t result = check_usable(comm, name)) return result;
  require_range(memory, bytes, comm->device, name);
  if (find(memory)->origin != Origin::nccl)
    return refuse(ncclInvalidArgument, fmt::format("{}: the memory is not from ncclMemAlloc", name));
  auto* made = new char;
  comm->registrations[made] = {static_cast<const char*>(memory), bytes, is_symmetric};
  comm->windows += is_symmetric;
  std::lock_guard lock(registered_mutex);
  registered().emplace(static_cast<const char*>(memory), bytes);
  *handle = made;
  return ncclSuccess;
}

ncclResult_t unregister(ncclComm_t comm, void* handle, const char* name) {
  auto found = comm->registrations.find(handle);
  if (found == comm->registrations.end())
    return refuse(ncclInvalidArgument, fmt::format("{}: not a handle of this communicator", name));
  comm->windows -= found->second.is_symmetric;
  {
    std::lock_guard lock(registered_mutex);
    registered().erase(registered().find(found->second.begin));
  }
  comm->registrations.erase(found);
  delete static_cast<char*>(handle);
  return ncclSuccess;
}

void end(ncclComm_t comm) {
  if (comm->starter.joinable()) comm->starter.join();
  while (!comm->registrations.empty()) unregister(comm, comm->registrations.begin()->first, "ncclCommDestroy");
  comm->destroyed = true;
  keep(comm);
}

}  // namespace

ncclResult_t refuse(ncclResult_t result, const std::string& text) {
  last_text = text;
  return reject(result, "{}", text);
}

ncclResult_t check_usable(ncclComm_t comm, const char* name) {
  if (!comm) return refuse(ncclInvalidArgument, fmt::format("{}: no communicator", name));
  if (comm->destroyed) die("{}: the communicator was destroyed", name);
  if (availability() != cudaSuccess) return refuse(ncclUnhandledCudaError, cudaGetErrorString(availability()));
  ncclResult_t state = comm->state;
  if (state == ncclInProgress)
    return refuse(ncclInvalidArgument,
                  fmt::format("{}: the call before has not ended; ask ncclCommGetAsyncError until it has", name));
  if (state != ncclSuccess) return refuse(state, fmt::format("{}: the communicator has failed before", name));
  return ncclSuccess;
}

ncclResult_t start(ncclComm_t comm, const ncclUniqueId& id) {
  ncclResult_t result =
      Segment::join(id, comm->ranks, comm->rank, host_number(), comm->device, comm->aborted, comm->segment);
  comm->state = result;
  return result;
}

ncclResult_t start_all(const std::vector<std::pair<ncclComm_t, ncclUniqueId>>& comms) {
  ncclResult_t result = ncclSuccess;
  std::vector<std::thread> threads;
  for (const auto& [comm, id] : comms) {
    ncclComm_t started = comm;
    std::thread thread([started, of = id] { start(started, of); });
    if (started->blocking)
      threads.push_back(std::move(thread));
    else
      started->starter = std::move(thread);
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& entry : comms) {
    ncclResult_t state = entry.first->blocking ? entry.first->state.load() : ncclInProgress;
    if (state != ncclSuccess) result = state;
  }
  return result;
}

}  // namespace cuda_double

using namespace cuda_double;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t) { return last_text.c_str(); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { return Segment::make_id(id); }

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  *comm = nullptr;
  if (availability() != cudaSuccess) return refuse(ncclUnhandledCudaError, cudaGetErrorString(availability()));
  if (config && (config->magic != 0xcafebeef || config->size != sizeof *config))
    return refuse(ncclInvalidArgument, "ncclCommInitRankConfig: a configuration without NCCL_CONFIG_INITIALIZER");
  if (ranks < 1 || ranks > kMaxRanks || rank < 0 || rank >= ranks)
    return refuse(ncclInvalidArgument, fmt::format("ncclCommInitRank: rank {} of {}", rank, ranks));
  auto* made = new ncclComm;
  made->ranks = ranks;
  made->rank = rank;
  made->device = current_device();
  made->blocking = !config || config->blocking != 0;
  made->state = ncclInProgress;
  *comm = made;
  if (defer_start(made, id)) return ncclSuccess;
  if (made->blocking) return start(made, id);
  return start_all({{made, id}});
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
  ncclUniqueId id = {};
  if (ncclResult_t result = ncclGetUniqueId(&id)) return result;
  for (int i = 0; i < count; ++i)
    if (int device = devices ? devices[i] : i; device < 0 || device >= device_count())
      return refuse(ncclUnhandledCudaError, fmt::format("ncclCommInitAll: no device {}", device));
  ncclGroupStart();
  for (int i = 0; i < count; ++i) {
    DeviceScope scope(devices ? devices[i] : i);
    ncclCommInitRank(comms + i, count, id, i);
  }
  return ncclGroupEnd();
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (!comm || comm->destroyed) return refuse(ncclInvalidArgument, "ncclCommGetAsyncError: no communicator");
  *error = availability() == cudaSuccess ? proceed(comm) : ncclUnhandledCudaError;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (ncclResult_t result = check_usable(comm, "ncclCommFinalize")) return result;
  wait_for_operations(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  if (comm->destroyed) die("ncclCommDestroy: the communicator was destroyed");
  if (comm->starter.joinable()) comm->starter.join();
  if (!comm->pending.empty()) enqueue_operations(comm, std::exchange(comm->pending, {}));
  wait_for_operations(comm);
  end(comm);
  comm->aborted = true;  // a graph that is launched from now on finds it so
  comm->segment = nullptr;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  if (comm->destroyed) die("ncclCommAbort: the communicator was destroyed");
  comm->aborted = true;
  if (comm->starter.joinable()) comm->starter.join();
  if (comm->segment) comm->segment->wake();
  end(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->ranks;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  cudaError_t error = call([&] { return allocate_now(pointer, bytes, Origin::nccl, "ncclMemAlloc"); });
  return error == cudaSuccess ? ncclSuccess : refuse(ncclUnhandledCudaError, cudaGetErrorString(error));
}

ncclResult_t ncclMemFree(void* pointer) {
  {
    std::lock_guard lock(registered_mutex);
    std::optional<Block> block = find(pointer);
    for (const auto& [begin, bytes] : registered())
      if (block && begin >= block->begin && begin < block->begin + block->bytes)
        return refuse(ncclInvalidUsage, "ncclMemFree: the memory is still registered");
  }
  cudaError_t error = call([&] { return free_now(pointer, "ncclMemFree"); });
  return error == cudaSuccess ? ncclSuccess : refuse(ncclUnhandledCudaError, cudaGetErrorString(error));
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* memory, size_t bytes, void** handle) {
  return register_memory(comm, memory, bytes, false, handle, "ncclCommRegister");
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  return unregister(comm, handle, "ncclCommDeregister");
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* memory, size_t bytes, ncclWindow_t* window, int flags) {
  if (flags != NCCL_WIN_DEFAULT && flags != NCCL_WIN_COLL_SYMMETRIC)
    return refuse(ncclInvalidArgument, fmt::format("ncclCommWindowRegister: flags {}", flags));
  if (reinterpret_cast<uintptr_t>(memory) % NCCL_WIN_REQUIRED_ALIGNMENT != 0)
    return refuse(ncclInvalidArgument, "ncclCommWindowRegister: the memory is not aligned to 4096 bytes");
  void* handle = nullptr;
  ncclResult_t result =
      register_memory(comm, memory, bytes, flags == NCCL_WIN_COLL_SYMMETRIC, &handle, "ncclCommWindowRegister");
  *window = static_cast<ncclWindow_t>(handle);
  return result;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  return unregister(comm, window, "ncclCommWindowDeregister");
}

}  // extern "C"
