// Copies within a device, across strides and types, filling, and counting.
#include <tandem/tensor/convert.h>
#include <tandem/tensor/count_value.h>
#include <tandem/tensor/cuda/kernels.h>
#include <tandem/tensor/cuda/launch.h>
#include <tandem/tensor/cuda/places.h>
#include <tandem/tensor/dispatch.h>

namespace tandem::cuda {
namespace {

template <class From, class To>
struct Convert {
  Places<2> places;
  TANDEM_DEVICE void operator()(std::int64_t i) const {
    char* at[2];
    places.at(i, at);
    value_at<To>(at[1]) = convert_value<To>(value_at<From>(at[0]));
  }
};

template <class T>
struct Fill {
  Places<1> places;
  T value;
  TANDEM_DEVICE void operator()(std::int64_t i) const {
    char* at[1];
    places.at(i, at);
    value_at<T>(at[0]) = value;
  }
};

template <class T>
struct Count {
  T start, step;
  T* y;
  TANDEM_DEVICE void operator()(std::int64_t i) const { y[i] = count_value(start, step, i); }
};

}  // namespace

void convert(const View& from, const View& to) {
  const cudaStream_t stream = use(to.device);
  const Places<2> both = places<2>({&from, &to});
  if (from.dtype != to.dtype) {
    dispatch_any("copy", from.dtype, [&]<class From>() {
      dispatch_any("copy", to.dtype, [&]<class To>() { for_each_index(stream, to.numel(), Convert<From, To>{both}); });
    });
    return;
  }
  if (from.contiguous() && to.contiguous()) {
    const std::size_t bytes = static_cast<std::size_t>(to.numel()) * size_of(to.dtype);
    if (bytes == 0 || from.data == to.data) return;
    return check_status(cudaMemcpyAsync(to.data, from.data, bytes, cudaMemcpyDeviceToDevice, stream), "copy");
  }
  dispatch_bits(from.dtype, [&]<class T>() { for_each_index(stream, to.numel(), Convert<T, T>{both}); });
}

void fill(const View& to, Scalar value) {
  const cudaStream_t stream = use(to.device);
  dispatch_any("fill", to.dtype, [&]<class T>() {
    for_each_index(stream, to.numel(), Fill<T>{places<1>({&to}), convert_scalar<T>(value)});
  });
}

void arange(Scalar start, Scalar step, const View& y) {
  const cudaStream_t stream = use(y.device);
  if (y.dtype == float64)
    for_each_index(stream, y.numel(), Count<double>{start.real(), step.real(), y.ptr<double>()});
  else
    for_each_index(stream, y.numel(),
                   Count<std::int64_t>{start.to<std::int64_t>(), step.to<std::int64_t>(), y.ptr<std::int64_t>()});
}

}  // namespace tandem::cuda
