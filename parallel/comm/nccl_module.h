// What libtandem and its module libtandem_nccl.so have in common.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include <tandem/parallel/comm/collective.h>

namespace tandem::parallel {

inline constexpr const char* kNcclModule = "libtandem_nccl.so";
/// Names another file to take for the module.
inline constexpr const char* kNcclModuleVariable = "TANDEM_NCCL_MODULE";
/// The name of the module's function, which changes when NcclLink or what it holds changes.
inline constexpr const char* kNcclEntry = "tandem_make_nccl_link_1";

/// One rank's part of a collective, on dense memory of its device.
struct NcclCall {
  Operation operation = Operation::barrier;
  ReduceOp op = ReduceOp::sum;
  DType dtype = DType::float32;
  int root = 0;
  std::int64_t count = 0;  // elements of a rank's share; of all_to_all, of one part
  const void* input = nullptr;
  void* output = nullptr;
};

/// One rank's communicator of NCCL. Nothing in it waits for another rank: what is begun has ended when poll says so,
/// before which nothing else may be begun. Used by one thread at a time. Errors are Error with NCCL's words. Destroying
/// it leaves everything as it is.
class NcclLink {
 public:
  virtual ~NcclLink() = default;
  /// What all ranks connect by; made by one of them.
  virtual std::string new_id() = 0;
  virtual void begin_connect(const std::string& id) = 0;
  /// Gives a collective to a stream of the device.
  virtual void begin(const NcclCall& call, void* stream) = 0;
  virtual bool poll() = 0;
  /// Memory that NCCL reaches directly on other devices; every rank calls it.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void begin_share(void* memory, std::size_t bytes) = 0;
  virtual void end_share(void* memory, std::size_t bytes) = 0;
  /// Once the device has nothing to do; every rank calls it in the same order.
  virtual void unshare(void* memory) = 0;
  /// Flushes what was given, in the end.
  virtual void begin_finalize() = 0;
  virtual void destroy() = 0;
  /// Ends what is under way at once, on the device, too.
  virtual void abort() = 0;
};

/// What the module's function gives: links that the caller owns, and the release of what allocate gave.
struct NcclTable {
  NcclLink* (*make_link)(int device, int rank, int size);
  void (*release)(int device, void* memory);
};
using NcclEntry = const NcclTable*();

}  // namespace tandem::parallel
