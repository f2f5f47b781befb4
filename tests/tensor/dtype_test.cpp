// Element types: conversions, the 16-bit formats, promotion.
#include <tandem/tests/support/test.h>

#include <bit>
#include <cmath>
#include <limits>

namespace tandem::test {
namespace {

constexpr DType kAll[] = {float32, float64, int64, int32, uint8, boolean, bfloat16, float16};

}  // namespace

TEST_CASE("dtype: names and sizes") {
  const std::string_view names[] = {"float32", "float64", "int64", "int32", "uint8", "bool", "bfloat16", "float16"};
  const std::size_t sizes[] = {4, 8, 8, 4, 1, 1, 2, 2};
  for (std::size_t i = 0; i < 8; ++i) {
    CHECK(name(kAll[i]) == names[i]);
    CHECK(size_of(kAll[i]) == sizes[i]);
  }
}

TEST_CASE("half: all 65536 patterns survive the way to float32 and back") {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    Float16 h;
    BFloat16 b;
    h.bits = b.bits = static_cast<std::uint16_t>(bits);
    const float fh = static_cast<float>(h), fb = static_cast<float>(b);
    if (std::isnan(fh))
      CHECK(std::isnan(static_cast<float>(Float16(fh))));
    else
      REQUIRE(Float16(fh).bits == h.bits);
    if (std::isnan(fb))
      CHECK(std::isnan(static_cast<float>(BFloat16(fb))));
    else
      REQUIRE(BFloat16(fb).bits == b.bits);
    // The value by the definition of the format.
    const int exponent = static_cast<int>(bits >> 10 & 31), fraction = static_cast<int>(bits & 1023);
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent < 31) {
      const double expected =
          exponent == 0 ? fraction * std::ldexp(1.0, -24) : std::ldexp(1024.0 + fraction, exponent - 25);
      REQUIRE(static_cast<double>(fh) == sign * expected);
    } else if (fraction == 0) {
      REQUIRE(std::isinf(fh));
    }
  }
}

TEST_CASE("half: between two neighbours the nearest is taken, in the middle the even one") {
  for (std::uint32_t bits = 0; bits < 0x7bff; ++bits) {
    Float16 low, high;
    low.bits = static_cast<std::uint16_t>(bits);
    high.bits = static_cast<std::uint16_t>(bits + 1);
    const float a = static_cast<float>(low), b = static_cast<float>(high), middle = (a + b) / 2;
    REQUIRE(Float16(middle).bits == (bits % 2 == 0 ? low.bits : high.bits));
    REQUIRE(Float16(std::nextafter(middle, a)).bits == low.bits);
    REQUIRE(Float16(std::nextafter(middle, b)).bits == high.bits);
    REQUIRE(Float16(-middle).bits == ((bits % 2 == 0 ? low.bits : high.bits) | 0x8000));
  }
  for (std::uint32_t bits = 0; bits < 0x7f7f; ++bits) {
    const auto at = [&](std::uint32_t rest) { return std::bit_cast<float>(bits << 16 | rest); };
    REQUIRE(BFloat16(at(0x8000)).bits == bits + bits % 2);
    REQUIRE(BFloat16(at(0x7fff)).bits == bits);
    REQUIRE(BFloat16(at(0x8001)).bits == bits + 1);
  }
  CHECK(Float16(65519.0F).bits == 0x7bff);
  CHECK(Float16(65520.0F).bits == 0x7c00);
  CHECK(Float16(-1e30F).bits == 0xfc00);
  CHECK(BFloat16(std::numeric_limits<float>::max()).bits == 0x7f80);
  CHECK(std::isnan(static_cast<float>(BFloat16(std::bit_cast<float>(0x7f800001U)))));
  CHECK(Float16(0x1p-25F).bits == 0);
  CHECK(Float16(0x1.8p-25F).bits == 1);
}

TEST_CASE("dtype: every type converts to every other") {
  for (const DType from : kAll)
    for (const DType to : kAll) {
      CAPTURE(name(from));
      CAPTURE(name(to));
      const Tensor x = tensor({0, 1, 3, 100}).to(from), y = x.to(to);
      CHECK(y.dtype() == to);
      const bool through_bool = from == boolean || to == boolean;
      CHECK(y.to_vector<double>() ==
            (through_bool ? std::vector<double>{0, 1, 1, 1} : std::vector<double>{0, 1, 3, 100}));
      CHECK(equal(x.unsqueeze(1).expand({4, 2}).to(to), y.unsqueeze(1).expand({4, 2})));  // other strides
    }
  const Tensor x = tensor({1.5});
  CHECK(x.to(float32).identity() == x.identity());
}

TEST_CASE("dtype: reals become integers by truncation and saturation") {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const Tensor x = tensor({1.9, -1.9, 1e30, -1e30, inf, -inf, nan, 255.5}, {.dtype = float64});
  using Limits64 = std::numeric_limits<int64_t>;
  using Limits32 = std::numeric_limits<std::int32_t>;
  for (const Tensor& v : {x, x.to(float32)}) {
    CHECK(v.to(int64).to_vector<int64_t>() ==
          std::vector<int64_t>{1, -1, Limits64::max(), Limits64::min(), Limits64::max(), Limits64::min(), 0, 255});
    CHECK(v.to(int32).to_vector<std::int32_t>() ==
          std::vector<std::int32_t>{1, -1, Limits32::max(), Limits32::min(), Limits32::max(), Limits32::min(), 0, 255});
    CHECK(v.to(uint8).to_vector<std::uint8_t>() == std::vector<std::uint8_t>{1, 0, 255, 0, 255, 0, 0, 255});
    CHECK(v.to(boolean).to_vector<bool>() == std::vector<bool>(8, true));
  }
  CHECK(tensor(1e30).item<int64_t>() == Limits64::max());
  CHECK(tensor(-1e30).item<int>() == Limits32::min());
  CHECK(tensor(nan).item<int>() == 0);
  CHECK(tensor(0.5).item<bool>());
  CHECK_FALSE(tensor(0.0).item<bool>());
  CHECK(full({}, 300.7, {.dtype = uint8}).item<int>() == 255);
  CHECK(full({}, nan, {.dtype = int32}).item<int>() == 0);
}

TEST_CASE("promote: the table of two types") {
  // PyTorch's, for the types that exist here. Rows and columns: bool, uint8, int32, int64, float16, bfloat16, float32,
  // float64.
  const DType order[] = {boolean, uint8, int32, int64, float16, bfloat16, float32, float64};
  const DType f16 = float16, b16 = bfloat16, f32 = float32, f64 = float64, i64 = int64, i32 = int32;
  const DType table[8][8] = {
      {boolean, uint8, i32, i64, f16, b16, f32, f64}, {uint8, uint8, i32, i64, f16, b16, f32, f64},
      {i32, i32, i32, i64, f16, b16, f32, f64},       {i64, i64, i64, i64, f16, b16, f32, f64},
      {f16, f16, f16, f16, f16, f32, f32, f64},       {b16, b16, b16, b16, f32, b16, f32, f64},
      {f32, f32, f32, f32, f32, f32, f32, f64},       {f64, f64, f64, f64, f64, f64, f64, f64}};
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) {
      CAPTURE(name(order[i]));
      CAPTURE(name(order[j]));
      CHECK(promote(order[i], order[j]) == table[i][j]);
      CHECK(result_type(zeros({2}, {.dtype = order[i]}), zeros({2}, {.dtype = order[j]})) == table[i][j]);
      CHECK(result_type(zeros({}, {.dtype = order[i]}), zeros({}, {.dtype = order[j]})) == table[i][j]);
    }
}

TEST_CASE("promote: single-number tensors and C++ numbers count only when their kind is higher") {
  const auto t = [](DType d, const Shape& s = {2}) { return ones(s, {.dtype = d}); };
  struct Row {
    DType with_dims, single, expected;
  };
  for (const Row& r : {Row{float32, float64, float32},
                       {int32, int64, int32},
                       {uint8, int64, uint8},
                       {int32, float64, float64},
                       {int64, float32, float32},
                       {boolean, int32, int32},
                       {float32, int64, float32},
                       {float64, float32, float64}}) {
    CAPTURE(name(r.with_dims));
    CAPTURE(name(r.single));
    CHECK(result_type(t(r.with_dims), t(r.single, {})) == r.expected);
    CHECK(result_type(t(r.single, {}), t(r.with_dims)) == r.expected);
    CHECK((t(r.with_dims) + t(r.single, {})).dtype() == r.expected);
  }
  CHECK((t(uint8) + 1).dtype() == uint8);
  CHECK((t(int32) * 2).dtype() == int32);
  CHECK((t(int32) * 0.5).dtype() == float32);
  CHECK((t(int64) - 0.5F).dtype() == float32);
  CHECK((t(boolean) + 1).dtype() == int64);
  CHECK((1.5 + t(boolean)).dtype() == float32);
  CHECK((t(float32) * 2.0).dtype() == float32);
  CHECK((2 * t(float64)).dtype() == float64);
  CHECK((t(int64, {}) * 2.5).dtype() == float32);
  CHECK((t(int32) / t(int32)).dtype() == float32);
  CHECK((t(int32) / 2).dtype() == float32);
  CHECK(exp(t(int64)).dtype() == float32);
  CHECK(neg(t(int32)).dtype() == int32);
  CHECK(sum(t(int32)).dtype() == int64);
  CHECK(sum(t(boolean)).dtype() == int64);
  CHECK((t(float32) < 1).dtype() == boolean);
  CHECK(clamp(t(int32), 0, 1).dtype() == int32);
  CHECK(clamp(t(int32), 0.5, 1.5).dtype() == float32);
  CHECK(where(t(float32) > 0, t(int32), t(float32)).dtype() == float32);
  CHECK(cat({t(int32), t(float64)}).dtype() == float64);
}

TEST_CASE("pointwise: types that have no arithmetic are clear errors") {
  const Tensor b = ones({2}, {.dtype = boolean}), h = ones({2}, {.dtype = float16});
  CHECK_ERROR(b + b, "[add]", "bool", ".to(");
  CHECK_ERROR(-b, "[neg]", "bool");
  CHECK_ERROR(h + h, "[add]", "float16", ".to(float32)");
  CHECK_ERROR(exp(h), "[exp]", "float16");
  CHECK_ERROR(mean(tensor({1, 2})), "[mean]", "int64", ".to(float32)");
  CHECK_ERROR(matmul(ones({2, 2}, {.dtype = int64}), ones({2, 2}, {.dtype = int64})), "[matmul]", "int64");
  CHECK_ERROR(matmul(ones({2, 2}), ones({2, 2}, {.dtype = float64})), "[matmul]", "float32", "float64");
  CHECK_ERROR(softmax(tensor({1, 2}), 0), "[softmax]", "int64");
  CHECK_ERROR(where(tensor({1, 0}), b, b), "[where]", "int64", "must be bool");
}

TEST_CASE("pointwise: integers wrap, divide as reals, and powers of them are exact") {
  CHECK(equal(tensor({200}, {.dtype = uint8}) + 100, tensor({44}, {.dtype = uint8})));
  CHECK(equal(-tensor({1}, {.dtype = uint8}), tensor({255}, {.dtype = uint8})));
  CHECK(equal(tensor({7, -7}) / 2, tensor({3.5, -3.5})));
  CHECK(equal(pow(tensor({2, -3, 0, 5, 4'000'000'000}), tensor({10, 3, 0, -1, 1})),
              tensor({1024, -27, 1, 0, 4'000'000'000})));
  CHECK(equal(pow(tensor({1, -1, -1, 10}), tensor({-5, -2, -3, 30})), tensor({1, 1, -1, 5076944270305263616})));
  const int64_t least = std::numeric_limits<int64_t>::min(), most = std::numeric_limits<int64_t>::max();
  const Tensor ends = tensor({least, most});
  CHECK(equal(ends + tensor({-1, 1}), tensor({most, least})));
  CHECK(equal(ends - tensor({1, -1}), tensor({most, least})));
  CHECK(equal(ends * 2, tensor({0, -2})));
  CHECK(equal(-ends, tensor({least, -most})));
  CHECK(equal(abs(ends), ends));
  CHECK(equal(abs(tensor({-3, 3})), tensor({3, 3})));
  CHECK(std::signbit(abs(tensor({-0.0})).item<float>()) == false);
  CHECK(equal(maximum(tensor({1, 5}), tensor({3, 2})), tensor({3, 5})));
}

TEST_CASE("Scalar: unsigned numbers that int64 does not hold") {
  CHECK(Scalar(std::uint64_t{1} << 62).to<int64_t>() == int64_t{1} << 62);
  CHECK(Scalar(std::uint8_t{255}).to<int64_t>() == 255);
  CHECK(Scalar(-1).to<int64_t>() == -1);
  CHECK_ERROR(Scalar(std::uint64_t{1} << 63), "[Scalar]", "9223372036854775808 does not fit into int64", "double");
  CHECK_ERROR(full({2}, ~std::uint64_t{0}), "[Scalar]", "18446744073709551615");
}

TEST_CASE("pointwise: NaN and infinities") {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  const Tensor x = tensor({nan, 1.0F, inf, -inf});
  auto is_nan = [](const Tensor& t, int64_t i) { return std::isnan(t[i].item<float>()); };
  CHECK(is_nan(maximum(x, zeros({4})), 0));
  CHECK(is_nan(maximum(zeros({4}), x), 0));
  CHECK(is_nan(minimum(x, zeros({4})), 0));
  CHECK(is_nan(minimum(zeros({4}), x), 0));
  CHECK(is_nan(relu(x), 0));
  CHECK(is_nan(clamp(x, 0, 1), 0));
  CHECK(is_nan(abs(x), 0));
  CHECK(clamp(x, 0, 1)[2].item<float>() == 1);
  CHECK(sigmoid(x)[3].item<float>() == 0);
  CHECK(sigmoid(x)[2].item<float>() == 1);
  CHECK(equal(x == x, tensor({false, true, true, true})));
  CHECK_FALSE(equal(x, x));
  CHECK_FALSE(allclose(x, x));
  CHECK(allclose(x.narrow(0, 1, 3), x.narrow(0, 1, 3)));
  CHECK_ERROR(clamp(x, 2, 1), "[clamp]", "low is 2, high is 1");
}

TEST_CASE("pointwise: ties and edges of derivatives") {
  Tensor a = tensor({1.0, 2.0}).requires_grad_(), b = tensor({1.0, 3.0}).requires_grad_();
  sum(maximum(a, b)).backward();
  CHECK(equal(a.grad(), tensor({0.5, 0.0})));
  CHECK(equal(b.grad(), tensor({0.5, 1.0})));
  Tensor z = tensor({0.0, -0.0, 3.0}).requires_grad_();
  sum(relu(z) + abs(z) + pow(z, 2) + pow(z, 0)).backward();
  CHECK(equal(z.grad(), tensor({0.0, 0.0, 8.0})));
  Tensor n = tensor({std::nanf(""), -1.0F, 1.0F}).requires_grad_();  // NaN is passed on, and its gradient as well
  sum(relu(n)).backward();
  CHECK(equal(n.grad(), tensor({1.0, 0.0, 1.0})));
  Tensor c = tensor({-1.0, 0.0, 1.0, 2.0}).requires_grad_();
  sum(clamp(c, 0, 1)).backward();
  CHECK(equal(c.grad(), tensor({0.0, 1.0, 1.0, 0.0})));
  Tensor d = tensor({1e-25, 1.0}).requires_grad_();  // squares of the divisor would vanish
  sum(tensor({1e-25, 1.0}) / d).backward();
  CHECK(allclose(d.grad(), tensor({-1e25, -1.0})));
  Tensor e = tensor({0.0, 2.0}).requires_grad_();
  sum(pow(e, tensor({2.0, 3.0}).requires_grad_())).backward();
  CHECK(equal(e.grad(), tensor({0.0, 12.0})));
}

}  // namespace tandem::test
