// Capture and replay of the work of one device.
#include <tandem/tensor/cuda/graph.h>

#include <optional>
#include <utility>

#include <tandem/tensor/cuda/allocator.h>
#include <tandem/tensor/cuda/capture.h>
#include <tandem/tensor/cuda/kernels.h>
#include <tandem/tensor/error.h>

namespace tandem::cuda {
namespace {

constexpr const char* kGraph = "Graph";

class Recording final : public CapturedGraph {
 public:
  explicit Recording(int device) : capture_(Device(DeviceType::cuda, device)) {
    empty_cache(device);  // what earlier steps have freed can become the graph's
    check_status(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), kGraph);
    // Calls of other threads do not disturb the capture.
    if (const cudaError_t status = cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal)) {
      (void)cudaStreamDestroy(stream_);
      check_status(status, kGraph);
    }
    scope_.emplace(device, stream_);
    set_current_capture(&capture_);
  }

  ~Recording() override {
    if (forked()) return;
    const FreeOfCapture free_of_capture;
    if (scope_) {
      cudaGraph_t graph = nullptr;
      (void)cudaStreamEndCapture(stream_, &graph);
      if (graph != nullptr) (void)cudaGraphDestroy(graph);
      (void)cudaGetLastError();
      end();
    }
    try {
      launched_.synchronize();
    } catch (const std::exception&) {  // the device is lost
    }
    if (executable_ != nullptr) (void)cudaGraphExecDestroy(executable_);
  }

  bool holds(const void* data) const override { return capture_.memory.holds(data); }

  void finish() override {
    cudaGraph_t graph = nullptr;
    const cudaError_t status = cudaStreamEndCapture(stream_, &graph);
    end();
    if (status != cudaSuccess) {
      (void)cudaGetLastError();
      fail(kGraph,
           "something in the function cannot be captured, and its error was ignored ({}); let the function run without "
           "reading values on the host, waiting for the device, or work on other streams",
           cudaGetErrorName(status));
    }
    std::size_t nodes = 0;
    cudaError_t made = cudaGraphGetNodes(graph, nullptr, &nodes);
    if (made == cudaSuccess && nodes > 0) made = cudaGraphInstantiate(&executable_, graph, 0);
    (void)cudaGraphDestroy(graph);
    check_status(made, kGraph);
    check(nodes > 0, kGraph, "the function gave no work to {}; are model and data on that device?", capture_.device);
    capture_.slots.finish();
  }

  void replay() override {
    const cudaStream_t stream = use(capture_.device);
    launched_.wait(stream);  // the last replay may have been on another stream
    capture_.slots.refresh(stream);
    check_status(cudaGraphLaunch(executable_, stream), kGraph);
    launched_.record(stream);
  }

 private:
  // The thread's work runs again.
  void end() {
    scope_.reset();
    set_current_capture(nullptr);
    (void)cudaStreamDestroy(stream_);
    for (const Capture::Freed& freed : std::exchange(capture_.freed, {}))
      release(freed.device, freed.data, freed.bytes);
  }

  Capture capture_;
  cudaStream_t stream_ = nullptr;  // of the capture
  cudaGraphExec_t executable_ = nullptr;
  Event launched_;
  std::optional<StreamScope> scope_;  // while it is captured
};

}  // namespace

std::unique_ptr<CapturedGraph> begin_capture(int device) { return std::make_unique<Recording>(device); }

void at_replay(UniqueFunction<void()> check_it) {
  check(current_capture() != nullptr, kGraph, "no graph is being captured");
  current_capture()->slots.add_check(std::move(check_it));
}

}  // namespace tandem::cuda
