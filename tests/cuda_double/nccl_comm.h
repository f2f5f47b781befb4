// A communicator of the double, and what is done with it: operations, alone and in groups.
#pragma once
#include <nccl.h>

#include <atomic>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "nccl_shared.h"
#include "quiet.h"

namespace cuda_double {

enum class Collective : int32_t { all_reduce, broadcast, reduce, all_gather, reduce_scatter, send, receive };

struct Operation {
  Collective kind = Collective::all_reduce;
  const void* send = nullptr;
  void* receive = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t operation = ncclSum;
  int root = 0;  // or the peer
  cudaStream_t stream = nullptr;

  bool is_transfer() const { return kind == Collective::send || kind == Collective::receive; }
};

struct Registration {
  const char* begin = nullptr;
  size_t bytes = 0;
  bool is_symmetric = false;
};

}  // namespace cuda_double

/// Its memory is kept when it is destroyed, so that work that comes late finds it aborted.
struct ncclComm {
  int ranks = 1, rank = 0, device = 0;
  bool blocking = true;
  std::unique_ptr<cuda_double::Segment> segment = {};
  std::thread starter = {};
  std::atomic<ncclResult_t> state{ncclSuccess};
  std::atomic<bool> aborted{false}, destroyed{false}, busy{false};
  std::atomic<uint32_t> outstanding{0};  // operations that were put into streams and have not ended
  uint64_t sequence = 0;                 // of the collective that runs, counted by the worker
  std::atomic<int> windows{0};
  std::map<void*, cuda_double::Registration> registrations = {};

  // Without blocking, operations reach their streams only while the caller asks for the state.
  std::vector<cuda_double::Operation> pending = {};
  int questions = 0;
};

namespace cuda_double {

/// Success, or why this communicator cannot be used now.
ncclResult_t check_usable(ncclComm_t comm, const char* name);
/// Says why a call fails, also to ncclGetLastError.
ncclResult_t refuse(ncclResult_t result, const std::string& text);
/// Puts operations that belong together into their streams.
ncclResult_t enqueue_operations(ncclComm_t comm, const std::vector<Operation>& operations);
/// Between ncclGroupStart and ncclGroupEnd: keeps the start of a communicator for later, and returns true.
bool defer_start(ncclComm_t comm, const ncclUniqueId& id);
/// Starts a communicator: waits for all ranks.
ncclResult_t start(ncclComm_t comm, const ncclUniqueId& id);
/// The same for several at once, each in a thread.
ncclResult_t start_all(const std::vector<std::pair<ncclComm_t, ncclUniqueId>>& comms);

}  // namespace cuda_double
