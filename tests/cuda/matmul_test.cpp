// Products of matrices on CUDA, of all layouts and with and without what is fused with them, against the CPU's.
#include <tandem/tests/support/test.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <tandem/autograd/engine.h>
#include <tandem/tensor/backend.h>
#include <tandem/tensor/cuda.h>
#include <tandem/tensor/cuda/streams.h>

namespace tandem {
namespace {

const Device kGpu{DeviceType::cuda, 0};

// Of sums of up to 130 products of numbers in [-0.5, 0.5).
double tolerance(DType dtype) { return dtype == float32 ? 1e-5 : 1e-12; }

struct Sizes {
  int64_t m, k, n;
};
constexpr Sizes kSizes[] = {{1, 1, 1},   {1, 7, 5}, {5, 1, 3}, {3, 5, 1}, {64, 33, 17}, {17, 64, 33},
                            {31, 16, 8}, {0, 4, 2}, {4, 0, 3}, {3, 5, 0}, {0, 0, 0},    {65, 130, 40}};

// How a matrix lies in memory: the memory's shape, and the matrix as a view of it.
struct Layout {
  std::string name;
  Shape (*memory)(int64_t rows, int64_t columns);
  Tensor (*view)(const Tensor& memory, int64_t rows, int64_t columns);
};
const Layout kLayouts[] = {
    {"packed",
     [](int64_t r, int64_t c) {
       return Shape{r, c};
     },
     [](const Tensor& t, int64_t, int64_t) { return t; }},
    {"transposed",
     [](int64_t r, int64_t c) {
       return Shape{c, r};
     },
     [](const Tensor& t, int64_t, int64_t) { return t.t(); }},
    {"columns",
     [](int64_t r, int64_t c) {
       return Shape{r, c + 3};
     },
     [](const Tensor& t, int64_t, int64_t c) { return t.narrow(1, 2, c); }},
    {"rows of a transpose",
     [](int64_t r, int64_t c) {
       return Shape{c, r + 5};
     },
     [](const Tensor& t, int64_t r, int64_t) { return t.t().narrow(0, 1, r); }},
    {"every second column",
     [](int64_t r, int64_t c) {
       return Shape{r, 2 * c};
     },
     [](const Tensor& t, int64_t, int64_t c) { return t.slice(1, 0, 2 * c, 2); }},
    {"every second row",
     [](int64_t r, int64_t c) {
       return Shape{2 * r, c};
     },
     [](const Tensor& t, int64_t r, int64_t) { return t.slice(0, 0, 2 * r, 2); }},
    {"one row repeated",
     [](int64_t, int64_t c) {
       return Shape{1, c};
     },
     [](const Tensor& t, int64_t r, int64_t c) {
       return t.expand({r, c});
     }},
    {"one column repeated",
     [](int64_t r, int64_t) {
       return Shape{r, 1};
     },
     [](const Tensor& t, int64_t r, int64_t c) {
       return t.expand({r, c});
     }},
    {"unaligned", [](int64_t r, int64_t c) { return Shape{r * c + 1}; },
     [](const Tensor& t, int64_t r, int64_t c) {
       return t.narrow(0, 1, r * c).view({r, c});
     }},
};

// One matrix on the CPU, packed, and on the device in a layout.
struct Pair {
  Tensor host, device;
};
Pair matrix(const Layout& layout, int64_t rows, int64_t columns, DType dtype) {
  const Tensor memory = rand(layout.memory(rows, columns), {.dtype = dtype}) - 0.5;
  return {layout.view(memory, rows, columns).contiguous(), layout.view(memory.to(kGpu), rows, columns)};
}

TEST_CASE("cuda: matmul takes operands of any strides") {
  for (const DType dtype : {float32, float64})
    for (const auto& size : kSizes)
      for (const Layout& layout_a : kLayouts)
        for (const Layout& layout_b : kLayouts) {
          const int64_t m = size.m, k = size.k, n = size.n;  // clang 14 captures no structured bindings
          CAPTURE(name(dtype));
          CAPTURE(m);
          CAPTURE(k);
          CAPTURE(n);
          CAPTURE(layout_a.name);
          CAPTURE(layout_b.name);
          const Pair a = matrix(layout_a, m, k, dtype), b = matrix(layout_b, k, n, dtype);
          Tensor c = empty({m, n}, {.dtype = dtype, .device = kGpu});
          backend(kGpu).matmul(a.device.raw(), b.device.raw(), c.raw_for_write());
          CHECK_CLOSE(c.to("cpu"), matmul(a.host, b.host), tolerance(dtype));
        }
}

TEST_CASE("cuda: linear of any layout, with and without bias and ReLU") {
  for (const DType dtype : {float32, float64})
    for (const auto& [rows, in, out] : kSizes)
      for (const Layout& layout : kLayouts)
        for (const bool biased : {false, true})
          for (const bool relu : {false, true}) {
            CAPTURE(name(dtype));
            CAPTURE(rows);
            CAPTURE(in);
            CAPTURE(out);
            CAPTURE(layout.name);
            CAPTURE(biased);
            CAPTURE(relu);
            const Pair x = matrix(layout, rows, in, dtype), w = matrix(layout, out, in, dtype);
            const Tensor bias = biased ? rand({out}, {.dtype = dtype}) - 0.5 : Tensor();
            const Tensor offset = biased ? bias.to(kGpu) : Tensor();
            Tensor y = empty({rows, out}, {.dtype = dtype, .device = kGpu});
            backend(kGpu).linear(x.device.raw(), w.device.raw(), biased ? offset.raw() : View(), relu,
                                 y.raw_for_write());
            CHECK_CLOSE(y.to("cpu"), linear(x.host, w.host, bias, relu), tolerance(dtype));
          }
}

TEST_CASE("cuda: gradients of matmul and linear") {
  for (const DType dtype : {float32, float64})
    for (const auto& [rows, in, out] : kSizes)
      for (const bool relu : {false, true})
        for (const bool transposed : {false, true}) {
          CAPTURE(name(dtype));
          CAPTURE(rows);
          CAPTURE(in);
          CAPTURE(out);
          CAPTURE(relu);
          CAPTURE(transposed);
          const Tensor x = transposed ? randn({in, rows}, {.dtype = dtype}) : randn({rows, in}, {.dtype = dtype});
          const Tensor w = randn({out, in}, {.dtype = dtype}), bias = randn({out}, {.dtype = dtype});
          const Tensor g = randn({rows, out}, {.dtype = dtype}), right = randn({out, 3}, {.dtype = dtype});
          const auto gradients = [&](Device device) {
            std::vector<Tensor> leaves;
            for (const Tensor& t : {x, w, bias, right}) leaves.push_back(t.to(device).clone().requires_grad_());
            const Tensor y = linear(transposed ? leaves[0].t() : leaves[0], leaves[1], leaves[2], relu);
            y.backward(g.to(device), true);
            const Tensor z = matmul(y, leaves[3]);
            z.backward(ones_like(z));
            for (Tensor& leaf : leaves) leaf = leaf.grad().to("cpu");
            return leaves;
          };
          const std::vector<Tensor> expected = gradients("cpu"), found = gradients(kGpu);
          for (std::size_t i = 0; i < expected.size(); ++i) {
            CAPTURE(i);
            CHECK_CLOSE(found[i], expected[i], 10 * tolerance(dtype));
          }
        }
}

TEST_CASE("cuda: gradients of a linear layer of which only some are asked for") {
  for (int wanted = 1; wanted < 8; ++wanted)
    for (const bool relu : {false, true}) {
      CAPTURE(wanted);
      CAPTURE(relu);
      const Tensor tensors[] = {randn({6, 5}), randn({4, 5}), randn({4})};
      const Tensor g = randn({6, 4});
      const auto gradients = [&](Device device) {
        std::vector<Tensor> leaves;
        for (int i = 0; i < 3; ++i) leaves.push_back(tensors[i].to(device).clone().requires_grad_((wanted >> i) % 2));
        linear(leaves[0], leaves[1], leaves[2], relu).backward(g.to(device));
        return leaves;
      };
      const std::vector<Tensor> expected = gradients("cpu"), found = gradients(kGpu);
      for (std::size_t i = 0; i < 3; ++i) {
        CAPTURE(i);
        REQUIRE(found[i].grad().defined() == expected[i].grad().defined());
        if (expected[i].grad().defined()) CHECK_CLOSE(found[i].grad().to("cpu"), expected[i].grad(), 1e-5);
      }
    }
}

TEST_CASE("cuda: a gradient goes through a linear layer and the ReLU before it in one product") {
  // The tests with this variable measure nothing: what the double has is taken.
  const char* const refused = std::getenv("TANDEM_CUDA_DOUBLE_LT_REFUSE");
  for (const DType dtype : {float32, float64})
    for (const auto& [rows, in, out] : kSizes)
      for (const bool biased : {false, true}) {
        const Tensor x = randn({rows, in}, {.dtype = dtype}), w = randn({out, in}, {.dtype = dtype});
        const Tensor bias = biased ? randn({out}, {.dtype = dtype}) : Tensor();
        const Tensor g = randn({rows, 7}, {.dtype = dtype}), next = randn({7, out}, {.dtype = dtype});
        const Tensor offset = biased ? bias.to(kGpu) : Tensor();
        Tensor y = empty({rows, out}, {.dtype = dtype, .device = kGpu}), dx = empty_like(y);
        Tensor db = empty({out}, {.dtype = dtype, .device = kGpu});
        Tensor mask = empty({rows, mask_bytes(out)}, {.dtype = uint8, .device = kGpu});
        const bool fused =
            backend(kGpu).linear_relu_mask(x.to(kGpu).raw(), w.to(kGpu).raw(), biased ? offset.raw() : View(),
                                           y.raw_for_write(), mask.raw_for_write());
        const Tensor expected = linear(x, w, bias, true);
        CHECK_CLOSE(y.to("cpu"), expected, 10 * tolerance(dtype));
        if (refused != nullptr) CHECK(fused == (std::string(refused).empty() && x.numel() > 0 && y.numel() > 0));
        if (!fused) continue;
        backend(kGpu).linear_relu_input_grad(g.to(kGpu).raw(), next.to(kGpu).raw(), y.raw(), mask.raw(),
                                             dx.raw_for_write(), db.raw_for_write());
        const Tensor through = where(expected > 0, matmul(g, next), zeros_like(expected));
        CHECK_CLOSE(dx.to("cpu"), through, 10 * tolerance(dtype));
        CHECK_CLOSE(db.to("cpu"), sum(through, 0), 10 * tolerance(dtype));
      }
}

TEST_CASE("cuda: gradients of several linear layers, where others see the results between them, too") {
  enum class Hidden { unseen, kept, hooked, used_twice, a_root, changed_gradient };
  const Tensor x = randn({9, 5}), w1 = randn({6, 5}), b1 = randn({6}), w2 = randn({4, 6}), b2 = randn({4}),
               w3 = randn({3, 4});
  for (const Hidden hidden :
       {Hidden::unseen, Hidden::kept, Hidden::hooked, Hidden::used_twice, Hidden::a_root, Hidden::changed_gradient})
    for (const bool frozen : {false, true})
      for (const bool biased : {false, true}) {
        CAPTURE(static_cast<int>(hidden));
        CAPTURE(frozen);
        CAPTURE(biased);
        const auto gradients = [&](Device device) {
          std::vector<Tensor> leaves;
          for (const Tensor& t : {x, w1, b1, w2, b2, w3}) leaves.push_back(t.to(device).clone().requires_grad_());
          if (frozen) leaves[2].requires_grad_(false);
          Tensor h = linear(leaves[0], leaves[1], biased ? leaves[2] : Tensor(), true);
          Tensor seen;
          autograd::HookHandle hook;
          if (hidden == Hidden::kept) h.retain_grad();
          if (hidden == Hidden::hooked) hook = autograd::register_hook(h, [&](const Tensor& g) { return seen = g; });
          if (hidden == Hidden::changed_gradient)
            hook = autograd::register_hook(h, [&](const Tensor& g) { return g * 2; });
          Tensor y = linear(linear(h, leaves[3], leaves[4], true), leaves[5]);
          if (hidden == Hidden::used_twice) y = y + sum(h, 1, true);
          std::vector<Tensor> roots{sum(y * y)};
          if (hidden == Hidden::a_root) roots.push_back(sum(h));
          if (hidden == Hidden::a_root) roots.push_back(h[0][0]);
          for (const bool retain : {true, false}) autograd::backward(roots, {}, retain);
          std::vector<Tensor> all{seen, h.grad()};
          for (const Tensor& leaf : leaves) all.push_back(leaf.grad());
          for (Tensor& t : all)
            if (t.defined()) t = t.to("cpu");
          return all;
        };
        const std::vector<Tensor> expected = gradients("cpu"), found = gradients(kGpu);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          CAPTURE(i);
          REQUIRE(found[i].defined() == expected[i].defined());
          if (expected[i].defined()) CHECK_CLOSE(found[i], expected[i], 1e-4);
        }
      }
}

TEST_CASE("cuda: batches of products, vectors, and inputs of more dimensions") {
  const Tensor a = randn({3, 1, 4, 5}), b = randn({2, 5, 6}), v = randn({5}), w = randn({7, 5}), x = randn({2, 3, 5});
  const Tensor da = a.to(kGpu), db = b.to(kGpu), dv = v.to(kGpu);
  CHECK_CLOSE(matmul(da, db).to("cpu"), matmul(a, b), 1e-5);
  CHECK_CLOSE(matmul(da, dv).to("cpu"), matmul(a, v), 1e-5);
  CHECK_CLOSE(matmul(dv, db).to("cpu"), matmul(v, b), 1e-5);
  CHECK_CLOSE(matmul(dv, dv).to("cpu"), matmul(v, v), 1e-5);
  CHECK_CLOSE(linear(x.to(kGpu), w.to(kGpu)).to("cpu"), linear(x, w), 1e-5);
}

TEST_CASE("cuda: products have the same bits whenever they are repeated") {
  const Tensor x = randn({50, 70}).to(kGpu), w = randn({30, 70}).to(kGpu), bias = randn({30}).to(kGpu);
  const std::vector<float> first = linear(x, w, bias, true).to_vector<float>();
  for (int i = 0; i < 5; ++i) CHECK(linear(x, w, bias, true).to_vector<float>() == first);
}

TEST_CASE("cuda: threads that share a device keep their biases and workspaces apart") {
  const Tensor x = randn({20, 30}), w = randn({10, 30});
  const Tensor on_device = x.to(kGpu), weight = w.to(kGpu);
  constexpr int kThreads = 3, kRounds = 30;
  std::vector<Tensor> found(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      const Tensor bias = full({10}, 1.0 * t, {.dtype = float32}).to(kGpu);
      Tensor sum = zeros({20, 10}, {.device = kGpu});
      for (int i = 0; i < kRounds; ++i) sum = sum + linear(on_device, weight, bias, t % 2 == 1);
      found[static_cast<std::size_t>(t)] = sum.to("cpu");
    });
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < kThreads; ++t) {
    const Tensor expected = linear(x, w, full({10}, 1.0 * t, {.dtype = float32}), t % 2 == 1) * kRounds;
    CHECK_CLOSE(found[static_cast<std::size_t>(t)], expected, 1e-4);
  }
}

TEST_CASE("cuda: several threads go back through one hidden layer") {
  const Tensor x = randn({20, 30}), w = randn({16, 30}), bias = randn({16});
  constexpr int kThreads = 4, kRounds = 10;
  const auto biases = [&](const Device& device) {
    const Tensor b = bias.to(device).requires_grad_();
    const Tensor h = linear(x.to(device), w.to(device).requires_grad_(), b, true);
    std::vector<Tensor> losses;
    manual_seed(3);
    for (int t = 0; t < kThreads; ++t) losses.push_back(sum(linear(h, randn({5 + t, 16}).to(device).requires_grad_())));
    std::vector<std::thread> threads;
    for (const Tensor& loss : losses)
      threads.emplace_back([&loss] {
        for (int i = 0; i < kRounds; ++i) loss.backward({}, true);
      });
    for (std::thread& thread : threads) thread.join();
    return b.grad().to("cpu");
  };
  CHECK_CLOSE(biases(kGpu), biases(Device()), 1e-4);
}

TEST_CASE("cuda: what products have on a stream goes with it") {
  const auto held = [] {
    cuda::synchronize(kGpu);
    empty_cache();
    return memory_stats(kGpu).reserved;
  };
  const Tensor x = randn({300, 300}).to(kGpu);
  (void)matmul(x, x);
  const std::size_t before = held(), used = memory_stats(kGpu).in_use;
  for (int64_t i = 1; i <= 3; ++i) {  // problems that are met, and measured, on these streams
    const cuda::OwnStream stream(kGpu);
    const cuda::OnStream scope(stream);
    const Tensor part = x.narrow(1, 0, 100 * i);
    (void)matmul(part, part.t());
    CHECK(memory_stats(kGpu).in_use == used);
  }
  CHECK(held() == before);
}

TEST_CASE("cuda: TF32 is allowed only when it is asked for") {
  CHECK_FALSE(cuda::allow_tf32());
  const Tensor a = randn({32, 48}), b = randn({48, 16});
  cuda::set_allow_tf32(true);
  CHECK(cuda::allow_tf32());
  CHECK_CLOSE(matmul(a.to(kGpu), b.to(kGpu)).to("cpu"), matmul(a, b), 5e-2);
  cuda::set_allow_tf32(false);
  CHECK_FALSE(cuda::allow_tf32());
  CHECK_CLOSE(matmul(a.to(kGpu), b.to(kGpu)).to("cpu"), matmul(a, b), 1e-5);
}

TEST_CASE("cuda: products that are refused") {
  const Tensor x = ones({2, 3}, {.dtype = int64, .device = kGpu});
  CHECK_ERROR(matmul(x, x.t()), "[matmul]", "is defined on float32 and float64; this tensor is int64");
  Tensor c = empty({2, 2}, {.dtype = int64, .device = kGpu});
  CHECK_ERROR(backend(kGpu).matmul(x.raw(), x.t().raw(), c.raw_for_write()), "[matmul]", "is not defined on int64");
  const Tensor a = ones({2, 3}, {.device = kGpu});
  CHECK_ERROR(matmul(a, a), "the inner sizes differ, 3 and 2");
  CHECK_ERROR(matmul(a, ones({3, 2})), "cuda:0", "cpu");
}

}  // namespace
}  // namespace tandem
