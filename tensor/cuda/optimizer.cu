// Optimizer steps: one kernel for as many parameters as fit into its arguments, so that nothing is copied or waited
// for.
#include <tandem/tensor/cuda/capture.h>
#include <tandem/tensor/cuda/kernels.h>
#include <tandem/tensor/cuda/launch.h>
#include <tandem/tensor/dispatch.h>
#include <tandem/tensor/optimizer_values.h>

namespace tandem::cuda {
namespace {

// A method says what a parameter's row in the kernel's arguments is, and how one element of it steps. `arrays` are what
// is read and written, the parameter first; a buffer that is not kept is null.
template <class T>
struct SGDMethod {
  using Value = T;
  using Args = SGDArgs;
  using Coefficients = SGDCoefficients<T>;
  static constexpr int kArrays = 2;
  struct Row {
    T* arrays[kArrays] = {};
    const T* gradient = nullptr;
    std::int64_t size = 0, first_chunk = 0;
    Coefficients coefficients;
    bool first_step = false, nesterov = false;
  };
  static Row row(const Args& args) {
    Row r;
    r.arrays[0] = args.parameter.ptr<T>();
    r.arrays[1] = args.momentum_buffer.ptr<T>();
    r.first_step = args.first_step;
    r.nesterov = args.nesterov;
    return r;
  }
  TANDEM_DEVICE static void step(const Row& row, const Coefficients& c, T g, T (&x)[kArrays]) {
    T d = c.decayed(g, x[0]);
    if (row.arrays[1] != nullptr) d = c.through_momentum(d, x[1], row.first_step, row.nesterov);
    x[0] -= c.lr * d;
  }
};

template <class T>
struct AdamMethod {
  using Value = T;
  using Args = AdamArgs;
  using Coefficients = AdamCoefficients<T>;
  static constexpr int kArrays = 4;
  struct Row {
    T* arrays[kArrays] = {};
    const T* gradient = nullptr;
    std::int64_t size = 0, first_chunk = 0;
    Coefficients coefficients;
  };
  static Row row(const Args& args) {
    Row r;
    r.arrays[0] = args.parameter.ptr<T>();
    r.arrays[1] = args.exp_avg.ptr<T>();
    r.arrays[2] = args.exp_avg_sq.ptr<T>();
    r.arrays[3] = args.max_exp_avg_sq.ptr<T>();
    return r;
  }
  TANDEM_DEVICE static void step(const Row& row, const Coefficients& c, T g, T (&x)[kArrays]) {
    const T w = x[0] * c.shrink;
    c.update_means(g, w, x[1], x[2]);
    T scale = x[2];
    if (row.arrays[3] != nullptr) {
      scale = x[3] > scale ? x[3] : scale;
      x[3] = scale;
    }
    x[0] = c.moved(w, x[1], scale);
  }
};

constexpr std::int64_t kChunk = 1024;  // elements of a parameter that a team steps
constexpr int kAtOnce = 4;             // of which a thread loads so many before it computes: all are under way at once
constexpr std::int64_t kStride = kChunk / kAtOnce;

// Elements `i`, `i` + kStride, ... of a chunk.
template <class Method>
struct Elements {
  const typename Method::Row& row;
  typename Method::Coefficients coefficients;
  std::int64_t begin;
  TANDEM_DEVICE void operator()(std::int64_t i) const {
    using T = typename Method::Value;
    T g[kAtOnce] = {}, x[kAtOnce][Method::kArrays] = {};
    for (int k = 0; k < kAtOnce; ++k) {
      const std::int64_t at = begin + i + k * kStride;
      if (at >= row.size) continue;
      g[k] = row.gradient[at];
      for (int a = 0; a < Method::kArrays; ++a)
        if (row.arrays[a] != nullptr) x[k][a] = row.arrays[a][at];
    }
    for (int k = 0; k < kAtOnce; ++k) {
      const std::int64_t at = begin + i + k * kStride;
      if (at >= row.size) continue;
      Method::step(row, coefficients, g[k], x[k]);
      for (int a = 0; a < Method::kArrays; ++a)
        if (row.arrays[a] != nullptr) row.arrays[a][at] = x[k][a];
    }
  }
};

template <class Method>
struct Step {
  static constexpr std::size_t kArgumentBytes = 4096;
  static constexpr int kRows = static_cast<int>((kArgumentBytes - 64) / sizeof(typename Method::Row));
  typename Method::Row rows[kRows] = {};
  const typename Method::Coefficients* live = nullptr;  // in a graph, those of the replay for each row; else null
  int count = 0;
  TANDEM_DEVICE void operator()(const Team& team, std::int64_t chunk) const {
    int r = 0;
    while (r + 1 < count && rows[r + 1].first_chunk <= chunk) ++r;
    const typename Method::Row& row = rows[r];
    team.loop(kStride,
              Elements<Method>{row, live != nullptr ? live[r] : row.coefficients, (chunk - row.first_chunk) * kChunk});
  }
};

template <class Method>
struct NextCoefficients {
  UniqueFunction<std::vector<typename Method::Args>()> next;
  void operator()(void* host) const {
    auto* to = static_cast<typename Method::Coefficients*>(host);
    for (const auto& args : next()) *to++ = Method::Coefficients::of(args);
  }
};

template <class Method>
void step_all(std::span<const typename Method::Args> args, MakeReplay<typename Method::Args> replay) {
  using Coefficients = typename Method::Coefficients;
  const Device device = args[0].parameter.device;
  const cudaStream_t stream = use(device);
  Step<Method> step;
  std::int64_t chunks = 0;
  if (capturing(device)) {
    Replay<typename Method::Args> again = replay();
    current_capture()->slots.add_check(std::move(again.check));
    step.live = static_cast<const Coefficients*>(
        slot(device, args.size() * sizeof(Coefficients), NextCoefficients<Method>{std::move(again.next)}));
  }
  const auto flush = [&] {
    for_each_team(stream, chunks, step);
    if (step.live != nullptr) step.live += step.count;
    step.count = 0;
    chunks = 0;
  };
  for (const auto& one : args) {
    if (step.count == Step<Method>::kRows) flush();
    typename Method::Row& row = step.rows[step.count++];
    row = Method::row(one);
    row.gradient = one.gradient.template ptr<typename Method::Value>();
    row.size = one.parameter.numel();
    row.first_chunk = chunks;
    row.coefficients = Coefficients::of(one);
    chunks += (row.size + kChunk - 1) / kChunk;
  }
  flush();
}

}  // namespace

void sgd_step(std::span<const SGDArgs> args, MakeReplay<SGDArgs> replay) {
  if (args.empty()) return;
  dispatch_real("SGD", args[0].parameter.dtype, [&]<class T>() { step_all<SGDMethod<T>>(args, replay); });
}
void adam_step(std::span<const AdamArgs> args, MakeReplay<AdamArgs> replay) {
  if (args.empty()) return;
  dispatch_real("Adam", args[0].parameter.dtype, [&]<class T>() { step_all<AdamMethod<T>>(args, replay); });
}

}  // namespace tandem::cuda
