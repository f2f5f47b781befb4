// Printing. The expected texts are those of PyTorch 1.13, in this library's spelling of types, sizes and booleans.
#include <tandem/tests/support/test.h>

#include <cmath>
#include <limits>

namespace tandem::test {
namespace {
const double kInf = std::numeric_limits<double>::infinity(), kNaN = std::nan("");
}

TEST_CASE("print: numbers in aligned columns") {
  CHECK(tensor({{1, 2, 3}, {4, 5, 6}}).str() == "tensor([[1, 2, 3],\n        [4, 5, 6]])");
  CHECK(tensor({{1, -2}, {30, 4}}).str() == "tensor([[ 1, -2],\n        [30,  4]])");
  CHECK(tensor({0.5, 1.25, -3.0}).str() == "tensor([ 0.5000,  1.2500, -3.0000])");
  CHECK(tensor({1.0, 2.0, 300.0}).str() == "tensor([  1.,   2., 300.])");
  CHECK(tensor({-1.0, 2.0, 300.0}).str() == "tensor([ -1.,   2., 300.])");
  CHECK(tensor({0.1, 99.9}).str() == "tensor([ 0.1000, 99.9000])");
  CHECK(tensor({-0.0, 1.5}).str() == "tensor([-0.0000, 1.5000])");
  CHECK(zeros({2, 2}).str() == "tensor([[0., 0.],\n        [0., 0.]])");
  CHECK(arange(8.0).view({2, 2, 2}).str() ==
        "tensor([[[0., 1.],\n         [2., 3.]],\n\n        [[4., 5.],\n         [6., 7.]]])");
  CHECK(zeros({1, 2, 1, 2}).str() == "tensor([[[[0., 0.]],\n\n         [[0., 0.]]]])");
}

TEST_CASE("print: scientific where the range is wide") {
  CHECK(tensor({1e-5, 1.0, 2.0}).str() == "tensor([1.0000e-05, 1.0000e+00, 2.0000e+00])");
  CHECK(tensor({1e5, 1.5, -2.25}).str() == "tensor([ 1.0000e+05,  1.5000e+00, -2.2500e+00])");
  CHECK(tensor({-1e-5, 1.0}).str() == "tensor([-1.0000e-05,  1.0000e+00])");
  CHECK(tensor({1e9, 1.0}).str() == "tensor([1.0000e+09, 1.0000e+00])");
  CHECK(tensor({123456789.0}).str() == "tensor([1.2346e+08])");
  CHECK(tensor({1e8}).str() == "tensor([100000000.])");
  CHECK(tensor({1e-20}).str() == "tensor([1.0000e-20])");
  CHECK(tensor({0.00012, 1.0}).str() == "tensor([1.2000e-04, 1.0000e+00])");
  CHECK(tensor({0.0, 5e-5}).str() == "tensor([0.0000e+00, 5.0000e-05])");
  CHECK(tensor({{0.1}, {20.25}, {-300.5}}).str() ==
        "tensor([[ 1.0000e-01],\n        [ 2.0250e+01],\n        [-3.0050e+02]])");
  CHECK(tensor({1e15}, {.dtype = float64}).str() == "tensor([1.0000e+15], dtype=float64)");
}

TEST_CASE("print: what is not finite") {
  CHECK(tensor({kNaN, kInf, -kInf, 1.5}).str() == "tensor([   nan,    inf,   -inf, 1.5000])");
  CHECK(tensor({kNaN, kInf, 2.0}).str() == "tensor([nan, inf, 2.])");
  CHECK(tensor({kNaN}).str() == "tensor([nan])");
}

TEST_CASE("print: single numbers, nothing at all, and every type") {
  CHECK(tensor(3.14159).str() == "tensor(3.1416)");
  CHECK(tensor(7).str() == "tensor(7)");
  CHECK(tensor(-2.0).str() == "tensor(-2.)");
  CHECK(tensor(true).str() == "tensor(true)");
  CHECK(tensor({true, false}).str() == "tensor([ true, false])");
  CHECK(empty({0}).str() == "tensor([])");
  CHECK(empty({0, 3}).str() == "tensor([], size={0, 3})");
  CHECK(empty({0}, {.dtype = int64}).str() == "tensor([], dtype=int64)");
  CHECK(empty({0, 2}, {.dtype = int32}).str() == "tensor([], size={0, 2}, dtype=int32)");
  CHECK(tensor({1.5, 2.0}, {.dtype = float64}).str() == "tensor([1.5000, 2.0000], dtype=float64)");
  CHECK(tensor({1, 2}, {.dtype = int32}).str() == "tensor([1, 2], dtype=int32)");
  CHECK(tensor({1, 200}, {.dtype = uint8}).str() == "tensor([  1, 200], dtype=uint8)");
  CHECK(tensor({1.5, -2.0}, {.dtype = bfloat16}).str() == "tensor([ 1.5000, -2.0000], dtype=bfloat16)");
  CHECK(tensor({1.5, -2.0}, {.dtype = float16}).str() == "tensor([ 1.5000, -2.0000], dtype=float16)");
  CHECK(tensor({9007199254740993}).str() == "tensor([9007199254740993])");
  CHECK(Tensor().str() == "tensor(undefined)");
}

TEST_CASE("print: gradients and devices") {
  Tensor x = tensor({1.0, 2.0}).requires_grad_();
  CHECK(x.str() == "tensor([1., 2.], requires_grad=true)");
  CHECK((x * 2).str() == "tensor([2., 4.], grad_fn=<recorded>)");
  set_cpu_device_count(2);
  CHECK(tensor({1.0, 2.0}, {.device = "cpu:1"}).str() == "tensor([1., 2.], device='cpu:1')");
  set_cpu_device_count(1);
  CHECK(fmt::format("{} on {}: {}", x.shape(), x.device(), x.detach()) == "{2} on cpu:0: tensor([1., 2.])");
}

TEST_CASE("print: lines break at 80 columns") {
  CHECK((arange(30) * 1000).str() ==
        "tensor([    0,  1000,  2000,  3000,  4000,  5000,  6000,  7000,  8000,  9000,\n"
        "        10000, 11000, 12000, 13000, 14000, 15000, 16000, 17000, 18000, 19000,\n"
        "        20000, 21000, 22000, 23000, 24000, 25000, 26000, 27000, 28000, 29000])");
  CHECK((arange(24.0) * 0.5 - 3).str() ==
        "tensor([-3.0000, -2.5000, -2.0000, -1.5000, -1.0000, -0.5000,  0.0000,  0.5000,\n"
        "         1.0000,  1.5000,  2.0000,  2.5000,  3.0000,  3.5000,  4.0000,  4.5000,\n"
        "         5.0000,  5.5000,  6.0000,  6.5000,  7.0000,  7.5000,  8.0000,  8.5000])");
  CHECK((arange(40).view({2, 20}) * 100).str() ==
        "tensor([[   0,  100,  200,  300,  400,  500,  600,  700,  800,  900, 1000, 1100,\n"
        "         1200, 1300, 1400, 1500, 1600, 1700, 1800, 1900],\n"
        "        [2000, 2100, 2200, 2300, 2400, 2500, 2600, 2700, 2800, 2900, 3000, 3100,\n"
        "         3200, 3300, 3400, 3500, 3600, 3700, 3800, 3900]])");
}

TEST_CASE("print: more than 1000 elements are shortened") {
  CHECK(arange(1001).str() == "tensor([   0,    1,    2,  ...,  998,  999, 1000])");
  CHECK((arange(1002.0) * 0.5).str() ==
        "tensor([0.0000e+00, 5.0000e-01, 1.0000e+00,  ..., 4.9950e+02, 5.0000e+02,\n        5.0050e+02])");
  CHECK(arange(2000).view({40, 50}).str() ==
        "tensor([[   0,    1,    2,  ...,   47,   48,   49],\n"
        "        [  50,   51,   52,  ...,   97,   98,   99],\n"
        "        [ 100,  101,  102,  ...,  147,  148,  149],\n"
        "        ...,\n"
        "        [1850, 1851, 1852,  ..., 1897, 1898, 1899],\n"
        "        [1900, 1901, 1902,  ..., 1947, 1948, 1949],\n"
        "        [1950, 1951, 1952,  ..., 1997, 1998, 1999]])");
  CHECK(zeros({2, 3, 501}).str() ==
        "tensor([[[0., 0., 0.,  ..., 0., 0., 0.],\n"
        "         [0., 0., 0.,  ..., 0., 0., 0.],\n"
        "         [0., 0., 0.,  ..., 0., 0., 0.]],\n\n"
        "        [[0., 0., 0.,  ..., 0., 0., 0.],\n"
        "         [0., 0., 0.,  ..., 0., 0., 0.],\n"
        "         [0., 0., 0.,  ..., 0., 0., 0.]]])");
}

}  // namespace tandem::test
