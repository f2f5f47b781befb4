// Kernels whose numbers change from replay to replay, captured in a graph of the runtime, with slots of this test's
// own.
#include <tandem/tests/support/test.h>

#include <cstring>
#include <memory>
#include <utility>

#include <tandem/tensor/backend.h>
#include <tandem/tensor/cuda/backend.h>
#include <tandem/tensor/cuda/capture.h>
#include <tandem/tensor/cuda/kernels.h>
#include <tandem/tensor/cuda/runtime.h>
#include <tandem/tensor/random.h>

namespace tandem::cuda {
namespace {

constexpr Device kDevice{DeviceType::cuda, 0};

const Host kTestHost = {.cpu = &kCpuBackend, .repeat_draw = repeat_draw};

struct Slot {
  void* memory;
  std::size_t bytes;
  UniqueFunction<void(void*)> refresh;
};

// One piece of the device's memory, for slots and for what kernels work on.
struct Memory {
  char* data = nullptr;
  std::size_t used = 0;
  Memory() { check_status(cudaMallocAsync(reinterpret_cast<void**>(&data), 1 << 20, use(kDevice)), "test"); }
  ~Memory() { (void)cudaFreeAsync(data, use(kDevice)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* take(std::size_t bytes) {
    void* const piece = data + used;
    used += (bytes + 63) / 64 * 64;
    return piece;
  }
  View view(const Tensor& like) {
    View v = like.raw();
    v.data = take(static_cast<std::size_t>(like.numel()) * size_of(like.dtype()));
    v.device = kDevice;
    if (like.numel() > 0)
      check_status(
          cudaMemcpyAsync(v.data, like.raw().data, static_cast<std::size_t>(like.numel()) * size_of(like.dtype()),
                          cudaMemcpyHostToDevice, use(kDevice)),
          "test");
    return v;
  }
};

Memory* g_memory = nullptr;
std::vector<Slot>* g_slots = nullptr;  // while a graph is being captured

class TestGraph {
 public:
  template <class Body>
  explicit TestGraph(const Body& body) {
    const cudaStream_t stream = use(kDevice);
    cudaGraph_t graph = nullptr;
    g_slots = &slots_;
    check_status(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "test");
    body();
    check_status(cudaStreamEndCapture(stream, &graph), "test");
    g_slots = nullptr;
    check_status(cudaGraphInstantiate(&executable_, graph, 0), "test");
    check_status(cudaGraphDestroy(graph), "test");
  }
  ~TestGraph() { (void)cudaGraphExecDestroy(executable_); }
  TestGraph(const TestGraph&) = delete;
  TestGraph& operator=(const TestGraph&) = delete;
  void replay() {
    const cudaStream_t stream = use(kDevice);
    for (const Slot& slot : slots_) {
      alignas(16) char host[16384];
      REQUIRE(slot.bytes <= sizeof(host));
      slot.refresh(host);
      check_status(cudaMemcpyAsync(slot.memory, host, slot.bytes, cudaMemcpyHostToDevice, stream), "test");
      check_status(cudaStreamSynchronize(stream), "test");
    }
    check_status(cudaGraphLaunch(executable_, stream), "test");
  }
  std::size_t slots() const { return slots_.size(); }

 private:
  std::vector<Slot> slots_;
  cudaGraphExec_t executable_ = nullptr;
};

Tensor on_host(const View& v, const Tensor& like) {
  Tensor host = empty_like(like);
  const std::size_t bytes = static_cast<std::size_t>(like.numel()) * size_of(like.dtype());
  check_status(cudaMemcpyAsync(host.raw_for_write().data, v.data, bytes, cudaMemcpyDeviceToHost, use(kDevice)), "test");
  check_status(cudaStreamSynchronize(use(kDevice)), "test");
  return host;
}

struct Setting {
  Memory memory;
  Setting() {
    g_host = &kTestHost;
    g_memory = &memory;
  }
  ~Setting() { (void)cudaStreamSynchronize(use(kDevice)); }
};

}  // namespace

const Host* g_host = nullptr;

bool capturing(Device) { return g_slots != nullptr; }
void* slot(Device, std::size_t bytes, UniqueFunction<void(void*)> refresh) {
  return g_slots->emplace_back(g_memory->take(bytes), bytes, std::move(refresh)).memory;
}

TEST_CASE("captured draws go on in their streams") {
  Setting setting;
  const Tensor like = zeros({1003});
  const View a = setting.memory.view(like), b = setting.memory.view(like);
  manual_seed(7);
  const RandomStream stream(3);
  TestGraph graph([&] {
    cuda::random(RandomKind::uniform, 0, 1, draw(251), a);
    cuda::random(RandomKind::normal, 0, 1, draw(251), b);
  });
  CHECK(graph.slots() == 2);
  CHECK(random_state().positions.empty());
  std::vector<Tensor> replayed;
  for (int i = 0; i < 3; ++i) {
    const RandomStream other(5);  // of the thread that replays, which does not matter
    graph.replay();
    replayed.push_back(on_host(a, like));
    replayed.push_back(on_host(b, like));
  }
  const std::vector<std::uint64_t> positions = random_state().positions;
  manual_seed(7);
  for (std::size_t i = 0; i < 6; i += 2) {
    CHECK(equal(replayed[i], rand({1003})));
    CHECK(allclose(replayed[i + 1], randn({1003}), 1e-6, 1e-6));
  }
  CHECK(random_state().positions == positions);
}

TEST_CASE("captured steps take their coefficients anew, each parameter its own") {
  Setting setting;
  manual_seed(8);
  constexpr std::size_t kCount = 100;  // more than one kernel takes
  std::vector<Tensor> host;
  std::vector<AdamArgs> on_cpu, args;
  std::vector<Tensor> kept;
  for (std::size_t i = 0; i < kCount; ++i) {
    const Tensor p = randn({5}), g = randn({5}), m = zeros({5}), v = zeros({5});
    AdamArgs one;
    one.parameter = p.raw();
    one.gradient = g.raw();
    one.exp_avg = m.raw();
    one.exp_avg_sq = v.raw();
    one.lr = 0.1;
    one.beta1 = 0.9;
    one.beta2 = 0.99;
    one.eps = 1e-8;
    one.step = 1 + static_cast<std::int64_t>(i % 3);
    on_cpu.push_back(one);
    one.parameter = setting.memory.view(p);
    one.gradient = setting.memory.view(g);
    one.exp_avg = setting.memory.view(m);
    one.exp_avg_sq = setting.memory.view(v);
    args.push_back(one);
    host.push_back(p);
    kept.insert(kept.end(), {g, m, v});
  }
  std::vector<AdamArgs> next = args;
  const auto replay = [&] {
    return Replay<AdamArgs>([&next] {
      const std::vector<AdamArgs> now = next;
      for (AdamArgs& one : next) {
        ++one.step;
        one.lr *= 0.5;
      }
      return now;
    });
  };
  TestGraph graph([&] { cuda::adam_step(args, replay); });
  CHECK(graph.slots() == 1);
  for (int i = 0; i < 3; ++i) {
    graph.replay();
    kCpuBackend.adam_step(on_cpu, replay);
    for (AdamArgs& one : on_cpu) {
      ++one.step;
      one.lr *= 0.5;
    }
  }
  for (std::size_t i = 0; i < kCount; ++i) CHECK_CLOSE(on_host(args[i].parameter, host[i]), host[i], 1e-5);
}

}  // namespace tandem::cuda
