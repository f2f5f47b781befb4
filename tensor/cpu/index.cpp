// Reading and adding at indices.
#include <tandem/tensor/cpu/kernels.h>
#include <tandem/tensor/cpu/loops.h>
#include <tandem/tensor/dispatch.h>

namespace tandem::cpu {
namespace {

View at(const View& x, int dim, std::int64_t i) {
  View part = x;
  part.data = x.ptr<char>() + i * x.strides[dim] * static_cast<std::int64_t>(size_of(x.dtype));
  part.shape[dim] = 1;
  return part;
}

// body(element of `small`, element of `large`) for each index: `large` is addressed by the index along `dim`.
template <class T, class Body>
void for_each_indexed(const View& small, int dim, const View& index, const View& large, const Body& body) {
  const std::int64_t count = index.numel();
  std::int64_t position[kMaxDims] = {};
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t s = 0, l = 0, at_index = 0;
    for (int d = 0; d < index.dims; ++d) {
      s += position[d] * small.strides[d];
      at_index += position[d] * index.strides[d];
      if (d != dim) l += position[d] * large.strides[d];
    }
    if (large.dims > 0) l += index.ptr<const std::int64_t>()[at_index] * large.strides[dim];
    body(small.ptr<T>()[s], large.ptr<T>()[l]);
    for (int d = index.dims - 1; d >= 0; --d) {
      if (++position[d] < index.shape[d]) break;
      position[d] = 0;
    }
  }
}

}  // namespace

void check_range(const RangeCheck& check, const View& numbers) {
  const std::int64_t count = numbers.numel();
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t rest = i, offset = 0;
    for (int d = numbers.dims - 1; d >= 0; --d) {
      offset += rest % numbers.shape[d] * numbers.strides[d];
      rest /= numbers.shape[d];
    }
    const std::int64_t number = numbers.ptr<const std::int64_t>()[offset];
    if (!check.good(number)) fail_range(check, number, i);
  }
}

void index_select(const View& x, int dim, const View& index, const View& y) {
  for (std::int64_t i = 0; i < index.shape[0]; ++i)
    copy(at(x, dim, index.ptr<const std::int64_t>()[i * index.strides[0]]), at(y, dim, i));
}

void index_add(const View& g, int dim, const View& index, const View& x) {
  for (std::int64_t i = 0; i < index.shape[0]; ++i) {
    const View target = at(x, dim, index.ptr<const std::int64_t>()[i * index.strides[0]]);
    binary(BinaryOp::add, target, at(g, dim, i), target);
  }
}

void gather(const View& x, int dim, const View& index, const View& y) {
  dispatch_bits(x.dtype,
                [&]<class T>() { for_each_indexed<T>(y, dim, index, x, [](T& to, const T& from) { to = from; }); });
}

void scatter_add(const View& g, int dim, const View& index, const View& x) {
  dispatch_number("scatter_add", x.dtype, [&]<class T>() {
    for_each_indexed<T>(g, dim, index, x, [](const T& from, T& to) { to = static_cast<T>(to + from); });
  });
}

}  // namespace tandem::cpu
