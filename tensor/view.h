// View: what a kernel sees of a tensor. Plain data, safe to pass to nvcc and to copy by value.
#pragma once
#include <cstdint>

#include <tandem/tensor/device.h>
#include <tandem/tensor/dtype.h>
#include <tandem/tensor/shape.h>

namespace tandem {

/// Pointer to the first element, type, shape and strides (in elements; 0 repeats).
struct View {
  void* data = nullptr;
  DType dtype = float32;
  Device device;
  int dims = 0;
  std::int64_t shape[kMaxDims] = {};
  std::int64_t strides[kMaxDims] = {};

  template <class T>
  T* ptr() const {
    return static_cast<T*>(data);
  }
  std::int64_t numel() const {
    std::int64_t n = 1;
    for (int i = 0; i < dims; ++i) n *= shape[i];
    return n;
  }
  bool contiguous() const {
    if (numel() == 0) return true;
    std::int64_t stride = 1;
    for (int i = dims - 1; i >= 0; --i) {
      if (shape[i] != 1 && strides[i] != stride) return false;
      stride *= shape[i];
    }
    return true;
  }
};

}  // namespace tandem
