#include <tandem/tensor/cpu/onednn.h>

#include <tandem/tensor/threads.h>

#if defined(TANDEM_ONEDNN)
#include <dnnl.hpp>
#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace tandem::cpu::onednn {
namespace {

// oneDNN takes its thread count from OpenMP's setting of the calling thread; a new thread has the environment's.
class UseThreads {
 public:
  explicit UseThreads([[maybe_unused]] int count) {
#if defined(_OPENMP)
    previous_ = omp_get_max_threads();
    if (previous_ != count) omp_set_num_threads(count);
    changed_ = previous_ != count;
#endif
  }
  ~UseThreads() {
#if defined(_OPENMP)
    if (changed_) omp_set_num_threads(previous_);
#endif
  }
  UseThreads(const UseThreads&) = delete;
  UseThreads& operator=(const UseThreads&) = delete;

 private:
  int previous_ = 1;
  bool changed_ = false;
};

const dnnl::engine& engine() {
  static const auto* e = new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *e;
}

// A primitive bakes in its shapes and its thread count, so both are the key. Each thread has its own.
using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, bool, bool, int>;

struct Linear {
  dnnl::matmul primitive;
  dnnl::memory x, w, bias, y;
  std::unordered_map<int, dnnl::memory> arguments;
  std::vector<char> scratchpad;
};

Linear make_linear(const Key& key) {
  using dims = dnnl::memory::dims;
  using tag = dnnl::memory::format_tag;
  const auto type = dnnl::memory::data_type::f32;
  const auto [rows, in, out, has_bias, relu, threads] = key;
  const dnnl::memory::desc x({rows, in}, type, tag::ab), w({in, out}, type, dims{1, in}), y({rows, out}, type, tag::ab);
  const dnnl::memory::desc bias({1, out}, type, tag::ab);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);  // else a primitive is tied to the thread that made it
  if (relu) {
    dnnl::post_ops post;
    post.append_eltwise(1.0F, dnnl::algorithm::eltwise_relu, 0.0F, 0.0F);
    attributes.set_post_ops(post);
  }
  const auto desc = has_bias ? dnnl::matmul::desc(x, w, bias, y) : dnnl::matmul::desc(x, w, y);
  const dnnl::matmul::primitive_desc primitive(desc, attributes, engine());
  Linear linear{dnnl::matmul(primitive), {}, {}, {}, {}, {}, {}};
  linear.x = dnnl::memory(x, engine(), nullptr);
  linear.w = dnnl::memory(w, engine(), nullptr);
  linear.y = dnnl::memory(y, engine(), nullptr);
  linear.arguments = {{DNNL_ARG_SRC, linear.x}, {DNNL_ARG_WEIGHTS, linear.w}, {DNNL_ARG_DST, linear.y}};
  if (has_bias) {
    linear.bias = dnnl::memory(bias, engine(), nullptr);
    linear.arguments.emplace(DNNL_ARG_BIAS, linear.bias);
  }
  linear.scratchpad.resize(primitive.scratchpad_desc().get_size() + 64);
  linear.arguments.emplace(DNNL_ARG_SCRATCHPAD,
                           dnnl::memory(primitive.scratchpad_desc(), engine(), linear.scratchpad.data()));
  return linear;
}

}  // namespace

void sgemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, const float* a,
           std::int64_t lda, const float* b, std::int64_t ldb, float* c, std::int64_t ldc) {
  const UseThreads threads(threads_per_device());
  const auto status =
      dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', m, n, k, 1.0F, a, lda, b, ldb, 0.0F, c, ldc);
  check(status == dnnl_success, "matmul", "oneDNN refused a product of {} x {} by {} x {} (status {})", m, k, k, n,
        static_cast<int>(status));
}

void linear(std::int64_t rows, std::int64_t in, std::int64_t out, const float* x, const float* w, const float* bias,
            bool relu, float* y) {
  constexpr std::size_t kMaxCached = 256;
  thread_local std::map<Key, Linear> cache;
  thread_local dnnl::stream stream(engine());
  const int threads = threads_per_device();
  const UseThreads use(threads);
  const Key key{rows, in, out, bias != nullptr, relu, threads};
  auto found = cache.find(key);
  if (found == cache.end()) {
    if (cache.size() >= kMaxCached) cache.clear();
    found = cache.emplace(key, make_linear(key)).first;
  }
  Linear& op = found->second;
  op.x.set_data_handle(const_cast<float*>(x));
  op.w.set_data_handle(const_cast<float*>(w));
  op.y.set_data_handle(y);
  if (bias != nullptr) op.bias.set_data_handle(const_cast<float*>(bias));
  op.primitive.execute(stream, op.arguments);
}

}  // namespace tandem::cpu::onednn

#else

namespace tandem::cpu::onednn {

void sgemm(bool, bool, std::int64_t, std::int64_t, std::int64_t, const float*, std::int64_t, const float*, std::int64_t,
           float*, std::int64_t) {}
void linear(std::int64_t, std::int64_t, std::int64_t, const float*, const float*, const float*, bool, float*) {}

}  // namespace tandem::cpu::onednn

#endif
