// What several tests of autograd share.
#pragma once
#include <tandem/tests/support/test.h>

namespace tandem::test {

/// A leaf with these values.
inline Tensor leaf(const Nested& values, DType dtype = float32) {
  return tensor(values, {.dtype = dtype, .requires_grad = true});
}

}  // namespace tandem::test
