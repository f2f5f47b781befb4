// Shapes, strides and lists of dimensions: small arrays of at most kMaxDims numbers, without allocation.
#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <tandem/tensor/error.h>

namespace tandem {

using std::int64_t;

inline constexpr int kMaxDims = 8;

/// A shape such as {64, 1, 28, 28}; {} is the shape of a single number. At most 8 dimensions.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> sizes) : Shape(std::span(sizes.begin(), sizes.size())) {}
  Shape(const std::vector<int64_t>& sizes) : Shape(std::span(sizes)) {}
  explicit Shape(std::span<const int64_t> sizes);

  int dim() const { return dim_; }
  std::size_t size() const { return static_cast<std::size_t>(dim_); }
  bool empty() const { return dim_ == 0; }
  /// Product of the sizes (1 for {}); throws Error when a size is negative or all but the zeros exceed 2^59.
  int64_t numel() const;
  /// Size of dimension i, 0 <= i < dim(), unchecked.
  int64_t operator[](int i) const { return sizes_[static_cast<std::size_t>(i)]; }
  int64_t& operator[](int i) { return sizes_[static_cast<std::size_t>(i)]; }
  const int64_t* begin() const { return sizes_.data(); }
  const int64_t* end() const { return sizes_.data() + dim_; }
  int64_t* begin() { return sizes_.data(); }
  int64_t* end() { return sizes_.data() + dim_; }
  operator std::span<const int64_t>() const { return {begin(), end()}; }

  void push_back(int64_t size) { insert(dim_, size); }
  void insert(int at, int64_t size);
  void erase(int at);
  /// "{64, 10}"
  std::string str() const;
  friend bool operator==(const Shape& a, const Shape& b) {
    if (a.dim_ != b.dim_) return false;
    for (int i = 0; i < a.dim_; ++i)
      if (a[i] != b[i]) return false;
    return true;
  }

 private:
  std::array<int64_t, kMaxDims> sizes_{};
  int dim_ = 0;
};

/// Strides of a dense row-major tensor of this shape, in elements.
Shape contiguous_strides(const Shape& shape);
/// Dimension `d` counted from the end when negative; throws Error naming `op` when out of range. A single number
/// counts as having one dimension, as in PyTorch.
int wrap_dim(std::string_view op, int64_t d, int dims);
/// The shape both broadcast to (aligned at the last dimension; size 1 stretches), or Error naming both.
Shape broadcast_shapes(std::string_view op, const Shape& a, const Shape& b);

/// The dimensions an operation works on: one number, a list, or none given, which means all of them.
class Dims {
 public:
  Dims() = default;
  template <class T>
  requires std::is_integral_v<T> Dims(T dim) : list_{static_cast<int64_t>(dim)} {}
  Dims(std::initializer_list<int64_t> dims) : list_(dims) {}
  Dims(const std::vector<int64_t>& dims) : list_(dims) {}
  /// One flag a dimension; repeated or out-of-range dimensions throw Error naming `op`.
  std::array<bool, kMaxDims> mask(std::string_view op, int dims) const;

 private:
  Shape list_;
};

}  // namespace tandem

template <>
struct fmt::formatter<tandem::Shape> : tandem::StrFormatter<tandem::Shape> {};
