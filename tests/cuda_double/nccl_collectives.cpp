// Collectives and transfers of NCCL, alone and in groups, as work on streams. Chunks go through shared memory, between
// two barriers. Ranks that disagree get an error, where a real NCCL hangs or corrupts memory. What it cannot catch:
// deadlocks by the order of several communicators, buffers that are too small for a protocol, topology, speed.
#include <algorithm>
#include <cstring>

#include "device_memory.h"
#include "nccl_comm.h"
#include "nccl_reduce.h"
#include "runtime.h"
#include "stream.h"

namespace cuda_double {
namespace {

thread_local int group_depth = 0;
thread_local std::vector<std::pair<ncclComm_t, Operation>> group_operations;
thread_local std::vector<std::pair<ncclComm_t, ncclUniqueId>> group_starts;

/// The state may be ncclInProgress for what the host puts into the stream meanwhile.
bool has_failed(const ncclComm& comm) {
  ncclResult_t state = comm.state.load(std::memory_order_relaxed);
  return state != ncclSuccess && state != ncclInProgress;
}

/// What a collective needs while it runs on a stream.
class Running {
 public:
  Running(ncclComm& comm, const Operation& operation)
      : comm_(comm), operation_(operation), width_(width_of(operation.type)), per_chunk_(kChunk / width_) {
    own_.sequence = ++comm.sequence;
    own_.count = operation.count;
    own_.kind = static_cast<int32_t>(operation.kind);
    own_.type = operation.type;
    own_.operation = operation.operation;
    own_.root = operation.root;
    own_.windows = comm.windows.load(std::memory_order_relaxed);
  }

  void run() {
    bool scatters = operation_.kind == Collective::reduce_scatter;
    for (int target = 0; target < (scatters ? comm_.ranks : 1); ++target) {
      size_t offset = 0;
      do {
        size_t count = std::min(per_chunk_, operation_.count - offset);
        if (!exchange(offset + (scatters ? static_cast<size_t>(target) * operation_.count : 0), count)) return;
        if (!scatters || target == comm_.rank) take(offset, count);
        if (!comm_.segment->barrier(comm_.aborted)) return;
        offset += count;
      } while (offset < operation_.count);
    }
  }

 private:
  bool exchange(size_t offset, size_t count) {
    Slot& slot = comm_.segment->slot(comm_.rank);
    slot.fingerprint = own_;
    if (operation_.kind != Collective::broadcast || comm_.rank == operation_.root)
      std::memcpy(slot.data, static_cast<const char*>(operation_.send) + offset * width_, count * width_);
    if (!comm_.segment->barrier(comm_.aborted)) return false;
    for (int rank = 0; rank < comm_.ranks; ++rank) {
      const Fingerprint& other = comm_.segment->slot(rank).fingerprint;
      if (other == own_) continue;
      comm_.state =
          reject(ncclInvalidUsage,
                 "NCCL: ranks disagree: rank {} has kind {}, {} elements of type {}, operation {}, root {}, {} "
                 "windows as call {}; rank {} has kind {}, {} elements of type {}, operation {}, root {}, {} "
                 "windows as call {}",
                 comm_.rank, own_.kind, own_.count, own_.type, own_.operation, own_.root, own_.windows, own_.sequence,
                 rank, other.kind, other.count, other.type, other.operation, other.root, other.windows, other.sequence);
      return false;
    }
    return true;
  }

  void take(size_t offset, size_t count) {
    if (operation_.kind == Collective::reduce && comm_.rank != operation_.root) return;
    char* out = static_cast<char*>(operation_.receive) + offset * width_;
    if (operation_.kind == Collective::broadcast) {
      std::memcpy(out, comm_.segment->slot(operation_.root).data, count * width_);
    } else if (operation_.kind == Collective::all_gather) {
      for (int rank = 0; rank < comm_.ranks; ++rank)
        std::memcpy(out + static_cast<size_t>(rank) * operation_.count * width_, comm_.segment->slot(rank).data,
                    count * width_);
    } else {
      std::vector<const void*> pieces;
      for (int rank = 0; rank < comm_.ranks; ++rank) pieces.push_back(comm_.segment->slot(rank).data);
      combine(operation_.type, operation_.operation, pieces, count, out);
    }
  }

  ncclComm& comm_;
  const Operation& operation_;
  size_t width_, per_chunk_;
  Fingerprint own_;
};

/// Sends and receives of one group: all make progress together.
class Transfers {
 public:
  Transfers(ncclComm& comm, const std::vector<Operation>& operations) : comm_(comm) {
    for (const Operation& operation : operations)
      if (operation.is_transfer()) transfers_.push_back({&operation, operation.count * width_of(operation.type)});
  }

  void run() {
    for (;;) {
      uint32_t seen = comm_.segment->activity();
      bool finished = true, moved = false;
      for (size_t i = 0; i < transfers_.size(); ++i) {
        if (transfers_[i].finished || !is_first(i)) {
          finished = finished && transfers_[i].finished;
          continue;
        }
        moved =
            (transfers_[i].operation->kind == Collective::send ? send(transfers_[i]) : receive(transfers_[i])) || moved;
        finished = finished && transfers_[i].finished;
      }
      if (finished || comm_.aborted.load(std::memory_order_relaxed)) return;
      if (comm_.segment->failed()) {
        if (!has_failed(comm_)) comm_.state = ncclRemoteError;
        return;
      }
      if (!moved) comm_.segment->wait_activity(seen);
    }
  }

 private:
  struct Transfer {
    const Operation* operation = nullptr;
    size_t bytes = 0, done = 0;
    bool finished = false;
  };

  /// Transfers in one direction with one peer keep their order.
  bool is_first(size_t i) const {
    for (size_t j = 0; j < i; ++j)
      if (!transfers_[j].finished && transfers_[j].operation->kind == transfers_[i].operation->kind &&
          transfers_[j].operation->root == transfers_[i].operation->root)
        return false;
    return true;
  }

  bool send(Transfer& transfer) {
    Mail& mail = comm_.segment->mail(comm_.rank, transfer.operation->root);
    if (mail.full.load()) return false;
    if (transfer.done == transfer.bytes) return transfer.finished = true;  // taken, as in a rendezvous
    size_t bytes = std::min(kChunk, transfer.bytes - transfer.done);
    mail.fingerprint = fingerprint(transfer);
    std::memcpy(mail.data, static_cast<const char*>(transfer.operation->send) + transfer.done, bytes);
    transfer.done += bytes;
    mail.full.store(1);
    comm_.segment->announce();
    return true;
  }

  bool receive(Transfer& transfer) {
    if (transfer.done == transfer.bytes) return transfer.finished = true;
    Mail& mail = comm_.segment->mail(transfer.operation->root, comm_.rank);
    if (!mail.full.load()) return false;
    if (!(mail.fingerprint == fingerprint(transfer))) {
      comm_.state = reject(ncclInvalidUsage,
                           "NCCL: rank {} receives {} elements of type {} from rank {}, which sends {} of type {}",
                           comm_.rank, transfer.operation->count, int(transfer.operation->type),
                           transfer.operation->root, mail.fingerprint.count, mail.fingerprint.type);
      comm_.segment->fail();
      return false;
    }
    size_t bytes = std::min(kChunk, transfer.bytes - transfer.done);
    std::memcpy(static_cast<char*>(transfer.operation->receive) + transfer.done, mail.data, bytes);
    transfer.done += bytes;
    mail.full.store(0);
    comm_.segment->announce();
    return true;
  }

  static Fingerprint fingerprint(const Transfer& transfer) {
    Fingerprint made;
    made.count = transfer.operation->count;
    made.type = transfer.operation->type;
    return made;
  }

  ncclComm& comm_;
  std::vector<Transfer> transfers_;
};

void run_operations(ncclComm& comm, const std::vector<Operation>& operations) {
  if (comm.aborted.load(std::memory_order_relaxed)) return;
  if (comm.busy.exchange(true, std::memory_order_relaxed))
    die("NCCL: two operations of one communicator run at once, in different streams");
  for (const Operation& operation : operations) {
    if (!operation.is_transfer() && !has_failed(comm)) Running(comm, operation).run();
  }
  if (!has_failed(comm)) Transfers(comm, operations).run();
  comm.busy.store(false, std::memory_order_relaxed);
}

ncclResult_t check(ncclComm_t comm, const Operation& operation, const char* name) {
  if (ncclResult_t result = check_usable(comm, name)) return result;
  require_explicit(operation.stream, name);
  size_t width = width_of(operation.type);
  if (width == 0) return refuse(ncclInvalidArgument, fmt::format("{}: type {}", name, int(operation.type)));
  if (operation.operation < ncclSum || operation.operation > ncclAvg)
    return refuse(ncclInvalidArgument, fmt::format("{}: operation {}", name, int(operation.operation)));
  if (operation.root < 0 || operation.root >= comm->ranks)
    return refuse(ncclInvalidArgument, fmt::format("{}: rank {} of {}", name, operation.root, comm->ranks));
  if (operation.stream->device != comm->device)
    return refuse(ncclInvalidUsage, fmt::format("{}: communicator of device {}, stream of device {}", name,
                                                comm->device, operation.stream->device));
  auto all = static_cast<size_t>(comm->ranks);
  bool is_root = comm->rank == operation.root;
  bool reads = operation.kind != Collective::receive && (operation.kind != Collective::broadcast || is_root);
  bool writes = operation.kind != Collective::send && (operation.kind != Collective::reduce || is_root);
  size_t bytes = operation.count * width;
  if (reads)
    require_range(operation.send, operation.kind == Collective::reduce_scatter ? all * bytes : bytes, comm->device,
                  name);
  if (writes)
    require_range(operation.receive, operation.kind == Collective::all_gather ? all * bytes : bytes, comm->device,
                  name);
  return ncclSuccess;
}

ncclResult_t hand_over(ncclComm_t comm, std::vector<Operation> operations) {
  if (comm->blocking) return enqueue_operations(comm, operations);
  comm->pending = std::move(operations);
  comm->questions = 0;
  comm->state = ncclInProgress;
  return ncclInProgress;
}

ncclResult_t submit(ncclComm_t comm, const Operation& operation, const char* name) {
  if (ncclResult_t result = check(comm, operation, name)) return result;
  if (group_depth == 0) return hand_over(comm, {operation});
  group_operations.emplace_back(comm, operation);
  return ncclSuccess;
}

}  // namespace

ncclResult_t enqueue_operations(ncclComm_t comm, const std::vector<Operation>& operations) {
  std::vector<cudaStream_t> streams;
  for (const Operation& operation : operations)
    if (std::find(streams.begin(), streams.end(), operation.stream) == streams.end())
      streams.push_back(operation.stream);
  for (cudaStream_t stream : streams) {
    std::vector<Operation> of_stream;
    for (const Operation& operation : operations)
      if (operation.stream == stream) of_stream.push_back(operation);
    bool counted = !stream->capture;  // a graph may never run
    if (counted) comm->outstanding.fetch_add(1, std::memory_order_relaxed);
    cudaError_t error = enqueue(stream, [comm, counted, of_stream = std::move(of_stream)] {
      run_operations(*comm, of_stream);
      if (counted && comm->outstanding.fetch_sub(1, std::memory_order_release) == 1) futex_wake(comm->outstanding);
    });
    if (error != cudaSuccess) return refuse(ncclUnhandledCudaError, cudaGetErrorString(error));
  }
  return ncclSuccess;
}

bool defer_start(ncclComm_t comm, const ncclUniqueId& id) {
  if (group_depth == 0) return false;
  group_starts.emplace_back(comm, id);
  return true;
}

}  // namespace cuda_double

using namespace cuda_double;

extern "C" {

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, {Collective::all_reduce, send, receive, count, type, operation, 0, stream}, "ncclAllReduce");
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, {Collective::broadcast, send, receive, count, type, ncclSum, root, stream}, "ncclBroadcast");
}

ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                        int root, ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, {Collective::reduce, send, receive, count, type, operation, root, stream}, "ncclReduce");
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return submit(comm, {Collective::all_gather, send, receive, count, type, ncclSum, 0, stream}, "ncclAllGather");
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, {Collective::reduce_scatter, send, receive, count, type, operation, 0, stream},
                "ncclReduceScatter");
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return submit(comm, {Collective::send, send, nullptr, count, type, ncclSum, peer, stream}, "ncclSend");
}

ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return submit(comm, {Collective::receive, nullptr, receive, count, type, ncclSum, peer, stream}, "ncclRecv");
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd: without ncclGroupStart");
  if (--group_depth > 0) return ncclSuccess;
  auto starts = std::exchange(group_starts, {});
  auto operations = std::exchange(group_operations, {});
  ncclResult_t result = starts.empty() ? ncclSuccess : start_all(starts);
  while (!operations.empty() && (result == ncclSuccess || result == ncclInProgress)) {
    ncclComm_t comm = operations.front().first;
    std::vector<Operation> of_comm;
    for (const auto& [owner, operation] : operations)
      if (owner == comm) of_comm.push_back(operation);
    std::erase_if(operations, [comm](const auto& entry) { return entry.first == comm; });
    ncclResult_t handed = hand_over(comm, std::move(of_comm));
    if (handed != ncclSuccess) result = handed;
  }
  return result;
}

}  // extern "C"
