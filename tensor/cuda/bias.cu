// What a linear layer needs beside its products: bias and ReLU, and their gradients.
#include <tandem/tensor/cuda/columns.h>
#include <tandem/tensor/cuda/kernels.h>
#include <tandem/tensor/dispatch.h>

namespace tandem::cuda {
namespace {

// The gradient before the ReLU; it is written to dz where there is a ReLU.
template <class T>
struct ReluGradient {
  const T *g, *y;
  T* dz;
  std::int64_t width;
  TANDEM_DEVICE double operator()(std::int64_t, std::int64_t row, std::int64_t column) const {
    const std::int64_t i = row * width + column;
    if (y == nullptr) return static_cast<double>(g[i]);
    const T value = y[i] <= T(0) ? T(0) : g[i];
    dz[i] = value;
    return static_cast<double>(value);
  }
};

template <class T>
struct StoreSum {
  T* db;
  TANDEM_DEVICE void operator()(std::int64_t, std::int64_t column, double total) const {
    db[column] = static_cast<T>(total);
  }
};

template <class T>
struct AddBias {
  const T* bias;
  T* y;
  std::int64_t width;
  bool relu;
  TANDEM_DEVICE void operator()(std::int64_t i) const {
    T value = y[i];
    if (bias != nullptr) value += bias[i % width];
    y[i] = relu && value < T(0) ? T(0) : value;
  }
};

}  // namespace

void bias_relu_grad(const View& g, const View& y, const View& dz, const View& db) {
  dispatch_real("linear", g.dtype, [&]<class T>() {
    const std::int64_t rows = g.shape[0], width = g.shape[1];
    combine_columns(g.device, {1, rows, width}, 0.0, Sum(),
                    ReluGradient<T>{g.ptr<const T>(), y.ptr<const T>(), dz.ptr<T>(), width}, StoreSum<T>{db.ptr<T>()});
  });
}

void add_bias(const View& bias, bool relu, const View& y) {
  const cudaStream_t stream = use(y.device);
  dispatch_real("linear", y.dtype, [&]<class T>() {
    for_each_index(stream, y.numel(), AddBias<T>{bias.ptr<const T>(), y.ptr<T>(), y.shape[1], relu});
  });
}

}  // namespace tandem::cuda
