// Graphs as the library sees them: what tensors they use. The rest is done by the CUDA module.
#include <tandem/tensor/cuda_graph.h>

#include <unordered_map>
#include <vector>

#include <tandem/tensor/capture.h>
#include <tandem/tensor/cuda/module.h>
#include <tandem/tensor/trace.h>

namespace tandem::cuda {
namespace {

constexpr const char* kGraph = "Graph";

}  // namespace

struct Graph::State final : CaptureWatch {
  Device device;
  std::unordered_map<const Storage*, std::shared_ptr<Storage>> kept;  // of before the capture
  std::unordered_map<const Storage*, std::weak_ptr<Storage>> written;
  std::unique_ptr<CapturedGraph> graph;  // goes first: it waits until the memory above is used no more

  explicit State(Device of) : device(of) {}

  void used(const std::shared_ptr<Storage>& storage, bool writes) override {
    if (storage->device() != device) return;
    if (writes) written[storage.get()] = storage;
    if (!graph->holds(storage->data())) kept[storage.get()] = storage;
  }
};

Graph::Graph(Device device) : device_(device) {
  check(device.is_cuda(), kGraph, "{} is no CUDA device; give \"cuda:0\" or another", device);
  check_exists(kGraph, device);
}
Graph::~Graph() = default;
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;

bool Graph::captured() const { return state_ != nullptr; }

void Graph::capture(FunctionRef<void()> body) {
  check(!capturing(), kGraph, "this thread is capturing a graph already; a capture within a capture is not possible");
  check(!captured(), kGraph, "it holds a capture already; assign a new Graph to it, or make another");
  auto state = std::make_unique<State>(device_);
  state->graph = module(kGraph).begin_capture(device_.index());
  t_capture_watch = state.get();
  struct Unwatch {
    ~Unwatch() { t_capture_watch = nullptr; }
  };
  {
    const Unwatch unwatch;
    body();
  }
  state->graph->finish();
  std::erase_if(state->written, [](const auto& entry) { return entry.second.expired(); });
  state_ = std::move(state);
}

void Graph::replay() {
  check(captured(), kGraph, "nothing was captured; call capture() first");
  check(!capturing(), kGraph, "a graph cannot be replayed while this thread captures one; replay it before or after");
  const trace::DeviceSpan span("graph", device_);
  state_->graph->replay();
  for (const auto& [address, written] : state_->written)
    if (const auto storage = written.lock()) storage->mark_changed();
}

}  // namespace tandem::cuda
