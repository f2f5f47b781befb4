// Graphs. A capture keeps a lane for each stream that took part, with its work and with the events that were recorded
// and waited for inside. A replay runs the lanes on workers of their own, ordered by those events alone: an event that
// is missing in the capture is a race in the replay, which ThreadSanitizer sees.
#pragma once
#include <cuda_runtime_api.h>

#include <memory>
#include <thread>
#include <vector>

#include "stream.h"

namespace cuda_double {

struct Node {
  enum class Kind { work, record, wait } kind = Kind::work;
  int device = 0;   // of work
  Body body = {};   // of work
  int signal = -1;  // of record and wait
};

/// What a capture leaves: lane 0 is the stream where it began.
struct Plan {
  std::vector<std::vector<Node>> lanes = {};
  int device = 0, signals = 0;
};

/// Where an event was recorded inside of a capture: `clock[lane]` pieces of work of each lane come before it.
struct Mark {
  std::shared_ptr<Capture> capture = {};
  int signal = 0;
  std::vector<size_t> clock = {};
};

class Capture : public std::enable_shared_from_this<Capture> {
 public:
  Capture(cudaStream_t origin, cudaStreamCaptureMode mode);
  ~Capture();

  cudaError_t add(int lane, int device, Body body);
  cudaError_t record(int lane, Mark& mark);
  /// Makes a stream wait for a mark of this capture; a stream outside of it joins.
  cudaError_t wait(cudaStream_t stream, const Mark& mark);
  /// Ends it, in the stream where it began.
  cudaError_t end(cudaStream_t stream, std::shared_ptr<const Plan>& plan);
  /// A captured stream is destroyed.
  void leave(cudaStream_t stream);

  void invalidate() { valid_.store(false, std::memory_order_relaxed); }
  bool valid() const { return valid_.load(std::memory_order_relaxed); }
  bool active() const { return active_.load(std::memory_order_relaxed); }
  bool forbids_thread(cudaStreamCaptureMode of_thread) const;
  unsigned long long id() const { return id_; }

 private:
  struct Lane {
    size_t work = 0;
    std::vector<size_t> clock = {};  // how much work of each lane comes before the end of this one
  };
  void raise(int lane, const std::vector<size_t>& clock);

  cudaStreamCaptureMode mode_;
  std::thread::id thread_ = std::this_thread::get_id();
  unsigned long long id_;
  std::atomic<bool> valid_{true}, active_{true};  // other threads look, too
  std::vector<cudaStream_t> streams_;
  std::vector<Lane> lanes_;
  std::shared_ptr<Plan> plan_ = std::make_shared<Plan>();
};

/// The rule for calls that wait for work, ask for it, or allocate: they invalidate the capture of their stream, and
/// those that their thread may not disturb (by the modes of the captures and of the thread).
cudaError_t forbid_in_capture(cudaStream_t stream, const char* call);

}  // namespace cuda_double
