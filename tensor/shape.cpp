#include <tandem/tensor/shape.h>

#include <algorithm>

#include <fmt/format.h>

namespace tandem {

Shape::Shape(std::span<const int64_t> sizes) {
  check(sizes.size() <= kMaxDims, "Shape", "{} dimensions were given; at most {} are supported", sizes.size(),
        kMaxDims);
  std::copy(sizes.begin(), sizes.end(), sizes_.begin());
  dim_ = static_cast<int>(sizes.size());
}

int64_t Shape::numel() const {
  constexpr int64_t kMaxElements = int64_t{1} << 59;
  int64_t count = 1;
  bool overflow = false, zero = false;
  for (const int64_t size : *this) {
    check(size >= 0, "Shape", "size {} in {} is negative", size, *this);
    zero |= size == 0;
    overflow |= size != 0 && __builtin_mul_overflow(count, size, &count);
  }
  // Also where another size is 0, so that no stride, in elements or in bytes, can overflow.
  check(!overflow && count <= kMaxElements, "Shape", "{} has too many elements; at most 2^59 are supported", *this);
  return zero ? 0 : count;
}

void Shape::insert(int at, int64_t size) {
  check(dim_ < kMaxDims, "Shape", "a dimension cannot be added to {}: at most {} are supported", *this, kMaxDims);
  std::copy_backward(begin() + at, end(), end() + 1);
  sizes_[static_cast<std::size_t>(at)] = size;
  ++dim_;
}

void Shape::erase(int at) {
  std::copy(begin() + at + 1, end(), begin() + at);
  --dim_;
}

std::string Shape::str() const { return fmt::format("{{{}}}", fmt::join(begin(), end(), ", ")); }

Shape contiguous_strides(const Shape& shape) {
  Shape strides = shape;
  int64_t stride = 1;
  for (int i = shape.dim() - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= std::max<int64_t>(shape[i], 1);
  }
  return strides;
}

int wrap_dim(std::string_view op, int64_t d, int dims) {
  const int64_t range = std::max(dims, 1);
  check(d >= -range && d < range, op, "dimension {} is out of range; the tensor has {} dimensions, so give {} to {}", d,
        dims, -range, range - 1);
  return static_cast<int>(d < 0 ? d + range : d);
}

Shape broadcast_shapes(std::string_view op, const Shape& a, const Shape& b) {
  if (a == b) return a;
  Shape out = a.dim() >= b.dim() ? a : b;
  for (int i = 1; i <= out.dim(); ++i) {
    const int64_t sa = i <= a.dim() ? a[a.dim() - i] : 1, sb = i <= b.dim() ? b[b.dim() - i] : 1;
    check(sa == sb || sa == 1 || sb == 1, op,
          "the shapes do not broadcast: a is {}, b is {}; from the last dimension on, sizes must be equal or 1", a, b);
    out[out.dim() - i] = sa == 1 ? sb : sa;
  }
  return out;
}

std::array<bool, kMaxDims> Dims::mask(std::string_view op, int dims) const {
  std::array<bool, kMaxDims> mask{};
  if (list_.empty()) {
    std::fill_n(mask.begin(), dims, true);
    return mask;
  }
  for (const int64_t d : list_) {
    bool& flag = mask[static_cast<std::size_t>(wrap_dim(op, d, dims))];
    check(!flag, op, "dimension {} is listed twice in {}", d, list_);
    flag = true;
  }
  return mask;
}

}  // namespace tandem
