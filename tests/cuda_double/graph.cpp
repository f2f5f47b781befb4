// Captures and the launch of graphs. What it cannot catch: kernels whose launch cannot be captured, the cost of
// instantiation, and limits of conditional or updated graphs, which it does not have.
#include "graph.h"

#include <algorithm>
#include <mutex>

#include "runtime.h"

struct CUgraph_st {
  std::shared_ptr<const cuda_double::Plan> plan;
};

struct CUgraphExec_st {
  std::shared_ptr<const cuda_double::Plan> plan;
  std::vector<cuda_double::Counter> signals, ends;  // ends: of lanes
  std::vector<cuda_double::Worker*> helpers;        // of lanes 1 and on
  cuda_double::Counter started, finished;
  std::mutex mutex;
  uint32_t launches = 0;
};

namespace cuda_double {
namespace {

std::mutex captures_mutex;
std::atomic<int> capture_count{0};
std::vector<Capture*>& captures() {
  static auto* all = new std::vector<Capture*>;
  return *all;
}
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

/// Launches of one graph follow each other, so the number of the launch tells a signal's states apart.
void run_lane(CUgraphExec_st& exec, size_t lane, uint32_t launch) {
  for (const Node& node : exec.plan->lanes[lane]) {
    shake();
    if (node.kind == Node::Kind::work) run_work(node.device, node.body);
    if (node.kind == Node::Kind::record) exec.signals[static_cast<size_t>(node.signal)].publish(launch);
    if (node.kind == Node::Kind::wait) exec.signals[static_cast<size_t>(node.signal)].wait(launch);
  }
}

}  // namespace

Capture::Capture(cudaStream_t origin, cudaStreamCaptureMode mode) : mode_(mode), streams_{origin} {
  static std::atomic<unsigned long long> ids{0};
  id_ = ids.fetch_add(1, std::memory_order_relaxed) + 1;
  lanes_.push_back({0, {0}});
  plan_->lanes.emplace_back();
  plan_->device = origin->device;
  std::lock_guard lock(captures_mutex);
  captures().push_back(this);
  capture_count.fetch_add(1, std::memory_order_relaxed);
}

Capture::~Capture() {
  std::lock_guard lock(captures_mutex);
  std::erase(captures(), this);
  capture_count.fetch_sub(1, std::memory_order_relaxed);
}

cudaError_t Capture::add(int lane, int device, Body body) {
  if (!valid()) return cudaErrorStreamCaptureInvalidated;
  auto at = static_cast<size_t>(lane);
  plan_->lanes[at].push_back({Node::Kind::work, device, std::move(body), -1});
  lanes_[at].clock[at] = ++lanes_[at].work;
  return cudaSuccess;
}

cudaError_t Capture::record(int lane, Mark& mark) {
  if (!valid()) return cudaErrorStreamCaptureInvalidated;
  auto at = static_cast<size_t>(lane);
  mark = {shared_from_this(), plan_->signals++, lanes_[at].clock};
  plan_->lanes[at].push_back({Node::Kind::record, 0, {}, mark.signal});
  return cudaSuccess;
}

void Capture::raise(int lane, const std::vector<size_t>& clock) {
  std::vector<size_t>& own = lanes_[static_cast<size_t>(lane)].clock;
  own.resize(lanes_.size());
  for (size_t i = 0; i < clock.size(); ++i) own[i] = std::max(own[i], clock[i]);
}

cudaError_t Capture::wait(cudaStream_t stream, const Mark& mark) {
  if (!valid()) return cudaErrorStreamCaptureInvalidated;
  if (!stream->capture) {
    stream->capture = shared_from_this();
    stream->lane = static_cast<int>(lanes_.size());
    streams_.push_back(stream);
    lanes_.emplace_back();
    plan_->lanes.emplace_back();
  }
  raise(stream->lane, mark.clock);
  plan_->lanes[static_cast<size_t>(stream->lane)].push_back({Node::Kind::wait, 0, {}, mark.signal});
  return cudaSuccess;
}

cudaError_t Capture::end(cudaStream_t stream, std::shared_ptr<const Plan>& plan) {
  if (stream != streams_.front()) {
    invalidate();
    return cudaErrorStreamCaptureUnmatched;
  }
  if (mode_ != cudaStreamCaptureModeRelaxed && thread_ != std::this_thread::get_id()) {
    invalidate();
    return cudaErrorStreamCaptureWrongThread;
  }
  raise(0, {});
  bool joined = true;
  for (size_t i = 1; i < lanes_.size(); ++i) joined = joined && lanes_[0].clock[i] >= lanes_[i].work;
  auto keep = shared_from_this();
  for (cudaStream_t captured : streams_) captured->capture = nullptr;
  streams_.clear();
  active_.store(false, std::memory_order_relaxed);
  if (!valid()) return cudaErrorStreamCaptureInvalidated;
  if (!joined) return reject(cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture: a stream was not joined again");
  plan = std::move(plan_);
  return cudaSuccess;
}

void Capture::leave(cudaStream_t stream) {
  invalidate();
  auto keep = shared_from_this();
  if (stream == streams_.front()) {
    for (cudaStream_t captured : streams_) captured->capture = nullptr;
    streams_.clear();
    active_.store(false, std::memory_order_relaxed);
  } else {
    std::erase(streams_, stream);
  }
}

bool Capture::forbids_thread(cudaStreamCaptureMode of_thread) const {
  if (!active() || mode_ == cudaStreamCaptureModeRelaxed || of_thread == cudaStreamCaptureModeRelaxed) return false;
  if (thread_ == std::this_thread::get_id()) return true;
  return mode_ == cudaStreamCaptureModeGlobal && of_thread == cudaStreamCaptureModeGlobal;
}

cudaError_t forbid_in_capture(cudaStream_t stream, const char* call) {
  bool forbidden = stream && stream->capture;
  if (forbidden) stream->capture->invalidate();
  if (capture_count.load(std::memory_order_relaxed) > 0) {
    std::lock_guard lock(captures_mutex);
    for (Capture* capture : captures()) {
      if (!capture->forbids_thread(thread_mode)) continue;
      capture->invalidate();
      forbidden = true;
    }
  }
  if (!forbidden) return cudaSuccess;
  return reject(cudaErrorStreamCaptureUnsupported, "{}: not permitted while a stream captures", call);
}

}  // namespace cuda_double

using namespace cuda_double;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return call([&] {
    require_explicit(stream, "cudaStreamBeginCapture");
    if (stream->capture) return cudaErrorIllegalState;
    stream->capture = std::make_shared<Capture>(stream, mode);
    stream->lane = 0;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return call([&] {
    *graph = nullptr;
    if (!stream->capture) return cudaErrorIllegalState;
    std::shared_ptr<const Plan> plan;
    if (cudaError_t error = stream->capture->end(stream, plan)) return error;
    *graph = new CUgraph_st{std::move(plan)};
    return cudaSuccess;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* node_count) {
  return call([&] {
    require_explicit(stream, "cudaStreamGetCaptureInfo");
    if (graph || nodes || edges || node_count) return reject(cudaErrorNotSupported, "captures show only status and id");
    *status = !stream->capture           ? cudaStreamCaptureStatusNone
              : stream->capture->valid() ? cudaStreamCaptureStatusActive
                                         : cudaStreamCaptureStatusInvalidated;
    if (id && stream->capture) *id = stream->capture->id();
    return cudaSuccess;
  });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return call([&] {
    std::swap(*mode, thread_mode);
    return cudaSuccess;
  });
}

/// Counts alone: the array of nodes must be null.
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  return call([&] {
    if (nodes) return reject(cudaErrorNotSupported, "cudaGraphGetNodes: nodes can only be counted");
    *count = 0;
    for (const auto& lane : graph->plan->lanes)
      for (const Node& node : lane) *count += node.kind == Node::Kind::work;
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
  return call([&] {
    if (flags != 0) return reject(cudaErrorNotSupported, "cudaGraphInstantiate: flags {} are not modelled", flags);
    auto made = std::make_unique<CUgraphExec_st>();
    made->plan = graph->plan;
    made->signals = std::vector<Counter>(static_cast<size_t>(graph->plan->signals));
    made->ends = std::vector<Counter>(graph->plan->lanes.size());
    for (size_t i = 1; i < graph->plan->lanes.size(); ++i) made->helpers.push_back(Worker::take(graph->plan->device));
    *exec = made.release();
    return cudaSuccess;
  });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return call([&] {
    require_explicit(stream, "cudaGraphLaunch");
    if (stream->capture)
      return reject(cudaErrorStreamCaptureUnsupported, "cudaGraphLaunch: a graph within a graph is not modelled");
    std::lock_guard lock(exec->mutex);
    uint32_t launch = ++exec->launches;
    stream->worker->push([exec, launch] {
      exec->finished.wait(launch - 1);
      exec->started.publish(launch);
      run_lane(*exec, 0, launch);
      for (size_t i = 1; i < exec->ends.size(); ++i) exec->ends[i].wait(launch);
      exec->finished.publish(launch);
    });
    for (size_t i = 1; i < exec->ends.size(); ++i)
      exec->helpers[i - 1]->push([exec, launch, i] {
        exec->started.wait(launch);
        run_lane(*exec, i, launch);
        exec->ends[i].publish(launch);
      });
    return cudaSuccess;
  });
}

// A real graph may be destroyed while it runs; here the call waits for its end.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  return call([&] {
    exec->finished.wait(exec->launches);
    for (Worker* helper : exec->helpers) helper->give_back();
    delete exec;
    return cudaSuccess;
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call([&] {
    delete graph;
    return cudaSuccess;
  });
}

}  // extern "C"
