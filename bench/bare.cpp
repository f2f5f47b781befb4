#include "bare.h"

#include <omp.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <dnnl.hpp>
#include <unordered_map>
#include <vector>

#include <tandem/tensor/compiler.h>

namespace bench {
namespace {

constexpr std::array<std::int64_t, 4> kSizes = {784, 512, 512, 10};

// 64-byte aligned floats, filled with small varied values.
struct Buffer {
  explicit Buffer(std::int64_t size = 0, float scale = 0.05F)
      : data(static_cast<float*>(std::aligned_alloc(64, (size * 4 + 63) / 64 * 64))), count(size) {
    for (std::int64_t i = 0; i < size; ++i) data[i] = scale * std::sin(0.7F * static_cast<float>(i));
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  float* data;
  std::int64_t count;
};

TANDEM_CLONES void sgd(std::int64_t n, float lr, const float* g, float* p) {
  for (std::int64_t i = 0; i < n; ++i) p[i] -= lr * g[i];
}

TANDEM_CLONES void adam(std::int64_t n, float step_size, float correction, const float* g, float* m, float* v,
                        float* p) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    m[i] = 0.9F * m[i] + 0.1F * g[i];
    v[i] = 0.999F * v[i] + 0.001F * g[i] * g[i];
    p[i] -= step_size * m[i] / (std::sqrt(v[i]) * correction + 1e-8F);
  }
}

TANDEM_CLONES void bias_relu(std::int64_t n, const float* b, bool relu, float* y) {
  for (std::int64_t j = 0; j < n; ++j) {
    const float v = y[j] + b[j];
    y[j] = relu && v < 0 ? 0 : v;
  }
}

TANDEM_CLONES void mask(std::int64_t n, const float* y, float* g) {
  for (std::int64_t j = 0; j < n; ++j) g[j] = y[j] > 0 ? g[j] : 0;
}

TANDEM_CLONES void add_rows(std::int64_t rows, std::int64_t n, const float* g, float* db) {
  for (std::int64_t j = 0; j < n; ++j) db[j] = 0;
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t j = 0; j < n; ++j) db[j] += g[r * n + j];
}

// A matmul primitive y = x w^T + b (then ReLU) with its memories.
struct Product {
  dnnl::matmul primitive;
  std::unordered_map<int, dnnl::memory> arguments;
};

}  // namespace

struct BareStep::Impl {
  struct Layer {
    Layer(std::int64_t batch, std::int64_t in, std::int64_t out)
        : w(in * out),
          b(out),
          dw(in * out),
          db(out),
          y(batch * out),
          dy(batch * out),
          mw(in * out, 0),
          vw(in * out, 0),
          mb(out, 0),
          vb(out, 0) {}
    Buffer w, b, dw, db, y, dy, mw, vw, mb, vb;
    Product product;
  };

  Impl(std::int64_t batch_size, bool use_adam, int thread_count, BareForward kind)
      : batch(batch_size), adam_update(use_adam), threads(thread_count), forward(kind), x(batch * kSizes[0], 0.5F) {
    omp_set_num_threads(threads);
    for (std::size_t l = 0; l < 3; ++l) layers[l] = std::make_unique<Layer>(batch, kSizes[l], kSizes[l + 1]);
    if (forward == BareForward::matmul)
      for (std::size_t l = 0; l < 3; ++l) make_product(l);
  }

  float* input(std::size_t l) { return l == 0 ? x.data : layers[l - 1]->y.data; }

  void make_product(std::size_t l) {
    using tag = dnnl::memory::format_tag;
    using dims = dnnl::memory::dims;
    const auto f32 = dnnl::memory::data_type::f32;
    const std::int64_t in = kSizes[l], out = kSizes[l + 1];
    const dnnl::memory::desc dx({batch, in}, f32, tag::ab), dw({in, out}, f32, dims{1, in}), db({1, out}, f32, tag::ab),
        dy({batch, out}, f32, tag::ab);
    dnnl::primitive_attr attributes;
    if (l < 2) {
      dnnl::post_ops post;
      post.append_eltwise(1.0F, dnnl::algorithm::eltwise_relu, 0.0F, 0.0F);
      attributes.set_post_ops(post);
    }
    const dnnl::matmul::primitive_desc desc(dnnl::matmul::desc(dx, dw, db, dy), attributes, engine);
    Layer& layer = *layers[l];
    layer.product.primitive = dnnl::matmul(desc);
    layer.product.arguments = {{DNNL_ARG_SRC, {dx, engine, input(l)}},
                               {DNNL_ARG_WEIGHTS, {dw, engine, layer.w.data}},
                               {DNNL_ARG_BIAS, {db, engine, layer.b.data}},
                               {DNNL_ARG_DST, {dy, engine, layer.y.data}}};
  }

  void run(bool products_only) {
    omp_set_num_threads(threads);
    for (std::size_t l = 0; l < 3; ++l) {
      Layer& layer = *layers[l];
      const std::int64_t in = kSizes[l], out = kSizes[l + 1];
      if (forward == BareForward::matmul) {
        layer.product.primitive.execute(stream, layer.product.arguments);
        continue;
      }
      dnnl_sgemm('N', 'T', batch, out, in, 1, input(l), in, layer.w.data, in, 0, layer.y.data, out);
      if (products_only) continue;
      for (std::int64_t r = 0; r < batch; ++r) bias_relu(out, layer.b.data, l < 2, layer.y.data + r * out);
    }
    for (std::size_t l = 3; l-- > 0;) {
      Layer& layer = *layers[l];
      const std::int64_t in = kSizes[l], out = kSizes[l + 1];
      if (!products_only) add_rows(batch, out, layer.dy.data, layer.db.data);
      dnnl_sgemm('T', 'N', out, in, batch, 1, layer.dy.data, out, input(l), in, 0, layer.dw.data, in);
      if (l == 0) break;
      float* dx = layers[l - 1]->dy.data;
      dnnl_sgemm('N', 'N', batch, in, out, 1, layer.dy.data, out, layer.w.data, in, 0, dx, in);
      if (!products_only) mask(batch * in, layers[l - 1]->y.data, dx);
    }
    if (products_only) return;
    ++steps;
    const auto step_size = static_cast<float>(1e-6 / (1.0 - std::pow(0.9, steps)));
    const auto correction = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(0.999, steps)));
    for (const auto& layer : layers) {
      update(layer->w, layer->dw, layer->mw, layer->vw, step_size, correction);
      update(layer->b, layer->db, layer->mb, layer->vb, step_size, correction);
    }
  }

  void update(Buffer& p, Buffer& g, Buffer& m, Buffer& v, float step_size, float correction) const {
    constexpr std::int64_t kGrain = 32'768;
    const bool parallel = threads > 1 && p.count > kGrain;
    const int pieces = parallel ? threads : 1;
    auto piece = [&](int i) {
      const std::int64_t begin = p.count * i / pieces / 64 * 64,
                         end = i + 1 == pieces ? p.count : p.count * (i + 1) / pieces / 64 * 64;
      if (adam_update)
        adam(end - begin, step_size, correction, g.data + begin, m.data + begin, v.data + begin, p.data + begin);
      else
        sgd(end - begin, 1e-6F, g.data + begin, p.data + begin);
    };
    if (!parallel) return piece(0);
#pragma omp parallel num_threads(pieces)
    piece(omp_get_thread_num());
  }

  std::int64_t batch;
  bool adam_update;
  int threads;
  BareForward forward;
  Buffer x;
  std::array<std::unique_ptr<Layer>, 3> layers;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  int steps = 0;
};

BareStep::BareStep(std::int64_t batch_size, bool adam, int threads, BareForward forward)
    : impl_(std::make_unique<Impl>(batch_size, adam, threads, forward)) {}
BareStep::~BareStep() = default;
void BareStep::run() { impl_->run(false); }
void BareStep::run_products() { impl_->run(true); }

}  // namespace bench
