// Graphs as the library sees them: what tensors and gradients they use. The rest is done by the CUDA module.
#include <tandem/tensor/cuda_graph.h>

#include <unordered_map>
#include <vector>

#include <tandem/tensor/capture.h>
#include <tandem/tensor/cuda/module.h>
#include <tandem/tensor/tensor.h>
#include <tandem/tensor/trace.h>

namespace tandem::cuda {
namespace {

constexpr const char* kGraph = "Graph";

}  // namespace

struct Graph::State final : CaptureWatch {
  // What the function does to a leaf's gradient.
  struct Gradient {
    std::weak_ptr<TensorImpl> leaf;
    bool depends = false;  // it reads or adds to the gradient of before, instead of replacing it
    Tensor before, after;  // `before` where it depends on that
  };
  // A tensor of before the capture, and where its elements were.
  struct Place {
    std::weak_ptr<TensorImpl> tensor;
    const Storage* storage = nullptr;
    const void* data = nullptr;  // the first element, somewhere in the storage
    Shape shape = {}, strides = {};
  };
  std::unordered_map<const Storage*, std::shared_ptr<Storage>> kept;  // of before the capture
  std::unordered_map<const Storage*, std::weak_ptr<Storage>> written;
  std::unordered_map<const TensorImpl*, Place> places;
  std::unordered_map<const TensorImpl*, Gradient> gradients;
  std::unique_ptr<CapturedGraph> graph;  // goes first: it waits until the memory above is used no more

  explicit State(Device of) : CaptureWatch(of) {}

  void used(const std::shared_ptr<TensorImpl>& tensor, bool writes) override {
    const std::shared_ptr<Storage>& storage = tensor->storage;
    if (storage->device() != device) return;
    if (writes) written[storage.get()] = storage;
    if (graph->holds(storage->data())) return;
    kept[storage.get()] = storage;
    places[tensor.get()] = {tensor, storage.get(), tensor->data(), tensor->shape, tensor->strides};
  }

  void gradient(const std::shared_ptr<TensorImpl>& leaf, const Tensor& now, bool depends) override {
    if (leaf->storage->device() != device) return;
    used(leaf, false);
    Gradient& g = gradients[leaf.get()];
    if (g.leaf.lock() == leaf) return;  // what was first decides
    g = {.leaf = leaf, .depends = depends, .before = depends ? now : Tensor(), .after = {}};
  }

  // After the function: nothing has run, so gradients have no values until a replay puts them into place.
  void take_gradients_back() noexcept {
    std::erase_if(gradients, [](const auto& entry) { return entry.second.leaf.expired(); });
    for (auto& [address, g] : gradients) {
      Tensor leaf(g.leaf.lock());
      g.after = leaf.grad();
      try {
        leaf.set_grad(g.before);
      } catch (const Error&) {  // the function has converted the leaf
      }
    }
  }

  // Throws Error when a replay would not do what the function would do now.
  void check_unchanged() const {
    for (const auto& [address, place] : places)
      if (const auto tensor = place.tensor.lock())
        check(tensor->storage.get() == place.storage && tensor->data() == place.data && tensor->shape == place.shape &&
                  tensor->strides == place.strides,
              kGraph,
              "a tensor of shape {} has other memory, or another shape or strides, than when the graph was "
              "captured; capture the graph again after a model is moved",
              tensor->shape);
    for (const auto& [address, g] : gradients) {
      const auto leaf = g.leaf.lock();
      if (!leaf || !g.depends) continue;
      const Tensor now = Tensor(leaf).grad();
      check(
          g.before.defined() || !now.defined(), kGraph,
          "a leaf of shape {} has a gradient, and had none when the graph was captured, so that the graph does not add "
          "to it; call zero_grad() at the beginning of the function that is captured, or before each replay",
          leaf->shape);
      check(
          now.identity() == g.before.identity(), kGraph,
          "the gradient of a leaf of shape {} is not the one that it had when the graph was captured, which the graph "
          "uses; call zero_grad() at the beginning of the function that is captured, or before the capture and each "
          "replay",
          leaf->shape);
    }
  }

  void leave_gradients() {
    for (const auto& [address, g] : gradients)
      if (auto leaf = g.leaf.lock()) Tensor(std::move(leaf)).set_grad(g.after);
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
  const trace::DeviceSpan span("capture", device_);
  auto state = std::make_unique<State>(device_);
  state->graph = module(kGraph).begin_capture(device_.index());
  t_capture_watch = state.get();
  struct Unwatch {
    State& state;
    ~Unwatch() {
      t_capture_watch = nullptr;
      state.take_gradients_back();
    }
  };
  {
    const Unwatch unwatch{*state};
    body();
  }
  state->graph->finish();
  std::erase_if(state->written, [](const auto& entry) { return entry.second.expired(); });
  std::erase_if(state->places, [](const auto& entry) { return entry.second.tensor.expired(); });
  state_ = std::move(state);
}

void Graph::replay() {
  check(captured(), kGraph, "nothing was captured; call capture() first");
  check(!capturing(), kGraph, "a graph cannot be replayed while this thread captures one; replay it before or after");
  const trace::DeviceSpan span("graph", device_);
  state_->check_unchanged();
  state_->graph->replay();
  for (const auto& [address, written] : state_->written)
    if (const auto storage = written.lock()) storage->mark_changed();
  state_->leave_gradients();
}

}  // namespace tandem::cuda
