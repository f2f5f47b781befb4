// Reading and adding at indices on CUDA: what the CPU gives, to the bit.
#include <tandem/tests/cuda/cuda_device.h>
#include <tandem/tests/support/test.h>

#include <functional>

#include <tandem/autograd/functions.h>
#include <tandem/tensor/backend.h>
#include <tandem/tensor/random.h>

namespace tandem::test {
namespace {

Tensor indices(const Shape& shape, int64_t below) { return randint(0, below, shape, {.dtype = int64}); }

// The gradients of index_select and gather are sums at indices.
Tensor gradient(const Tensor& x, const Tensor& g, const std::function<Tensor(const Tensor&)>& function) {
  Tensor leaf = x.detach().clone().requires_grad_();
  function(leaf).backward(g);
  return leaf.grad().to("cpu");
}

}  // namespace

TEST_CASE("cuda: index_select") {
  manual_seed(1);
  const Tensor x = randn({5, 6, 7}), index = indices({9}, 5);
  for (int d = 0; d < 3; ++d)
    CHECK(equal(index_select(x.to(kCuda), d, index.to(kCuda)).to("cpu"), index_select(x, d, index)));
  const Tensor t = x.transpose(0, 2);
  CHECK(equal(index_select(x.to(kCuda).transpose(0, 2), 1, index.to(kCuda)).to("cpu"), index_select(t, 1, index)));
  const Tensor bytes = (x > 0), nothing = zeros({0}, {.dtype = int64});
  CHECK(equal(index_select(bytes.to(kCuda), 0, index.to(kCuda)).to("cpu"), index_select(bytes, 0, index)));
  CHECK(index_select(x.to(kCuda), 0, nothing.to(kCuda)).shape() == Shape{0, 6, 7});
  CHECK_ERROR(index_select(x.to(kCuda), 0, tensor({5}).to(kCuda)).to("cpu"), "[index_select]", "index 5", "0 to 4");
}

TEST_CASE("cuda: gather") {
  manual_seed(2);
  const Tensor x = randn({5, 6, 7});
  for (int d = 0; d < 3; ++d) {
    const Tensor index = indices(d == 1 ? Shape{4, 9, 7} : Shape{4, 5, 7}, 5);
    CHECK(equal(gather(x.to(kCuda), d, index.to(kCuda)).to("cpu"), gather(x, d, index)));
    const Tensor turned = indices({7, 5, 4}, 4);
    CHECK(equal(gather(x.to(kCuda), d, turned.to(kCuda).transpose(0, 2)).to("cpu"),
                gather(x, d, turned.transpose(0, 2))));
  }
  CHECK(gather(tensor(3.0).to(kCuda), 0, tensor(0).to(kCuda)).item<float>() == 3);
  CHECK(equal(sum(one_hot(indices({6}, 4).to(kCuda), 4).to("cpu"), 1), ones({6}, {.dtype = int64})));
}

TEST_CASE("cuda: sums at indices have the CPU's bits, whatever their number") {
  manual_seed(3);
  struct Case {
    Shape shape;
    int dim;
    int64_t count;
  };
  // Lines that are walked; sorted rows with one, two and three passes; a single target, and more than one block of 256.
  for (const Case& c : {Case{{5, 6, 7}, 1, 100}, Case{{9, 3}, 0, 500}, Case{{2, 300}, 1, 1000}, Case{{70000}, 0, 2000},
                        Case{{1, 4}, 0, 300}, Case{{3, 5}, 0, 140000}}) {
    for (const DType dtype : {float32, float64}) {
      const Tensor x = zeros(c.shape, {.dtype = dtype});
      const Tensor index = indices({c.count}, c.shape[c.dim]);
      Shape shape = c.shape;
      shape[c.dim] = c.count;
      const Tensor g = randn(shape, {.dtype = dtype});
      const auto select = [&](const Tensor& in) { return index_select(in, c.dim, index.to(in.device())); };
      CHECK(equal(gradient(x.to(kCuda), g.to(kCuda), select), gradient(x, g, select)));
    }
  }
}

TEST_CASE("cuda: sums of lines that each have an index") {
  manual_seed(4);
  for (const int64_t count : {3, 400}) {
    for (int d = 0; d < 2; ++d) {
      const Tensor x = zeros({300, 600});
      const Shape shape = d == 0 ? Shape{count, 5} : Shape{5, count};
      const Tensor index = indices(shape, x.size(d)), g = randn(shape);
      const auto read = [&](const Tensor& in) { return gather(in, d, index.to(in.device())); };
      CHECK(equal(gradient(x.to(kCuda), g.to(kCuda), read), gradient(x, g, read)));
    }
  }
  const Tensor scalar = tensor(2.0).to(kCuda);
  const auto read = [&](const Tensor& in) { return gather(in, 0, zeros({}, {.dtype = int64, .device = kCuda})); };
  CHECK(gradient(scalar, ones({}, {.device = kCuda}), read).item<float>() == 1);
}

TEST_CASE("cuda: sums at indices add to what is there, exactly in integers") {
  const Tensor index = indices({1000}, 7), g = randint(-1000, 1000, {1000, 3}, {.dtype = int64});
  Tensor host = arange(21).view({7, 3}), device = host.to(kCuda);
  const auto add = [&](Tensor& to) {
    const Tensor values = g.to(to.device()), at = index.to(to.device());
    backend(to.device()).index_add(values.raw(), 0, at.raw(), to.raw_for_write());
  };
  add(host);
  add(device);
  CHECK(equal(device.to("cpu"), host));
}

TEST_CASE("cuda: an index that is out of range touches no memory") {
  for (const int64_t n : {4, 300}) {
    Tensor index = indices({n}, 3);
    index.narrow(0, 0, 3).copy_(tensor({-1, 3, int64_t{1} << 60}));
    const Tensor at = index.to(kCuda), g = ones({n}, {.device = kCuda});
    Tensor sums = zeros({3}, {.device = kCuda}), values = empty({n}, {.device = kCuda});
    backend(kCuda).index_add(g.raw(), 0, at.raw(), sums.raw_for_write());
    CHECK(sum(sums).item<float>() == static_cast<float>(n - 3));
    const Tensor x = ones({3}, {.device = kCuda});
    backend(kCuda).gather(x.raw(), 0, at.raw(), values.raw_for_write());
    CHECK(sum(values).item<float>() == static_cast<float>(n - 3));
  }
}

}  // namespace tandem::test
