// Softmax and losses at their edges: huge and infinite logits, labels out of range, nothing left to average.
#include <tandem/tests/support/test.h>

#include <cmath>
#include <limits>

namespace tandem::test {
namespace {
const double kInf = std::numeric_limits<double>::infinity();

bool any_equal(const Tensor& a, const Tensor& b) { return sum((a == b).to(int64)).item<int64_t>() > 0; }
}  // namespace

TEST_CASE("softmax: huge and infinite logits") {
  for (const DType dtype : {float32, float64}) {
    Tensor x = tensor({{1e4, 0.0, -1e4}, {-kInf, 2.0, 2.0}, {-1e4, -1e4, -1e4}}, {.dtype = dtype}).requires_grad_();
    const Tensor p = softmax(x, 1), l = log_softmax(x, 1);
    CHECK_CLOSE(p.detach(), tensor({{1.0, 0.0, 0.0}, {0.0, 0.5, 0.5}, {1 / 3.0, 1 / 3.0, 1 / 3.0}}, {.dtype = dtype}),
                1e-6);
    CHECK(l[0][0].item<double>() == 0);
    CHECK(l[0][2].item<double>() == -2e4);
    CHECK(l[1][0].item<double>() == -kInf);
    CHECK(l[2][1].item<double>() == doctest::Approx(-std::log(3.0)));
    sum(p * p).backward();
    CHECK(equal(x.grad() == x.grad(), full({3, 3}, true)));  // no NaN
  }
  const Tensor up = log_softmax(tensor({kInf, 0.0, 1.0}), 0), down = log_softmax(tensor({-kInf, -kInf}), 0);
  CHECK_FALSE(any_equal(up, up));
  CHECK_FALSE(any_equal(down, down));
  const Tensor loss = cross_entropy(tensor({{kInf, 0.0, 1.0}}), tensor({1}));
  CHECK_FALSE(any_equal(loss, loss));
  CHECK_ERROR(softmax(ones({2}), 1), "[softmax]", "dimension 1");
  CHECK(softmax(ones({2, 0}), 1).shape() == Shape{2, 0});
  CHECK(softmax(tensor(3.0), 0).item<double>() == 1);
}

TEST_CASE("cross_entropy: huge and infinite logits") {
  Tensor x = tensor({{1e4, 0.0}, {-1e4, 1e4}, {-kInf, 1.0}}).requires_grad_();
  const Tensor losses = cross_entropy(x, tensor({1, 1, 1}), {.reduction = Reduction::none});
  CHECK(equal(losses.detach(), tensor({1e4, 0.0, 0.0})));
  sum(losses).backward();
  CHECK(equal(x.grad(), tensor({{1.0, -1.0}, {0.0, 0.0}, {0.0, 0.0}})));
  CHECK(cross_entropy(x.detach(), tensor({0, 0, 0}), {.reduction = Reduction::none})[2].item<double>() == kInf);
}

// pytorch#43840: a label out of range gave a number silently.
TEST_CASE("cross_entropy: a label out of range") {
  const Tensor logits = tensor({{2.5, 0.0, 0.0}, {0.0, 0.0, 2.5}});
  CHECK_ERROR(cross_entropy(logits, tensor({0, 1000})), "[cross_entropy]", "label 1000 at row 1", "3 classes", "0 to 2",
              "-100");
  CHECK_ERROR(cross_entropy(logits, tensor({-1, 0})), "label -1 at row 0");
  CHECK_ERROR(nll_loss(logits, tensor({0, 3})), "[nll_loss]", "label 3 at row 1", "3 classes");
  CHECK_ERROR(cross_entropy(logits, tensor({0})), "one label a row", "{2, 3}", "{1}");
  CHECK_ERROR(cross_entropy(logits, tensor({0.0, 1.0})), "float32", "int64");
  CHECK_ERROR(cross_entropy(logits[0], tensor({0})), "{rows, classes}", "{3}");
  CHECK_ERROR(cross_entropy(logits, tensor({0, 1}), {.weight = ones({2})}), "weight a class", "3", "{2}");
  CHECK_ERROR(cross_entropy(logits, tensor({0, 1}), {.weight = ones({3}, {.dtype = float64})}), "float64");
  CHECK_ERROR(cross_entropy(logits, tensor({0, 1}), {.label_smoothing = 1.5}), "label_smoothing is 1.5", "0..1");
  CHECK_ERROR(cross_entropy(zeros({2, 0}), tensor({0, 0})), "no classes");
}

// pytorch#75181, #70348, #50224, #15870: all rows ignored, or no rows.
TEST_CASE("cross_entropy, nll_loss: nothing left gives 0 and gradients of 0") {
  struct Row {
    Tensor logits, labels;
  };
  for (const Row& row : {Row{randn({3, 4}), full({3}, -100)}, Row{zeros({0, 3}), zeros({0}, {.dtype = int64})}})
    for (const Reduction reduction : {Reduction::mean, Reduction::sum})
      for (const bool nll : {false, true}) {
        Tensor x = row.logits.clone().requires_grad_();
        const Tensor loss = nll ? nll_loss(x, row.labels, {.reduction = reduction})
                                : cross_entropy(x, row.labels, {.reduction = reduction, .label_smoothing = 0.1});
        CHECK(loss.item<double>() == 0);
        loss.backward();
        CHECK(equal(x.grad(), zeros(row.logits.shape())));
      }
  const LossParts parts = cross_entropy_parts(randn({2, 3}), full({2}, -100));
  CHECK(parts.sum.item<double>() == 0);
  CHECK(parts.normalizer.item<double>() == 0);
  CHECK(mse_loss(zeros({0}), zeros({0})).item<double>() == 0);
}

TEST_CASE("nll_loss: an infinity in an ignored row reaches neither loss nor gradient") {
  Tensor x = tensor({{-kInf, 0.0}, {-0.5, -1.0}}).requires_grad_();
  const Tensor loss = nll_loss(x, tensor({-100, 1}));
  CHECK(loss.item<double>() == 1);
  loss.backward();
  CHECK(equal(x.grad(), tensor({{0.0, 0.0}, {0.0, -1.0}})));
}

TEST_CASE("cross_entropy: parts add up to the whole, with weights and ignored labels") {
  const Tensor x = tensor({{1.0, 2.0, 0.5}, {0.1, -1.0, 2.0}, {3.0, 1.0, 1.0}, {0.0, 0.2, 0.4}, {1.0, 1.0, 5.0}},
                          {.dtype = float64});
  const Tensor labels = tensor({0, 2, -100, 1, 1}), weight = tensor({0.5, 2.0, 3.0}, {.dtype = float64});
  const CrossEntropyOptions options{.weight = weight, .label_smoothing = 0.2};
  const LossParts a = cross_entropy_parts(x.narrow(0, 0, 3), labels.narrow(0, 0, 3), options);
  const LossParts b = cross_entropy_parts(x.narrow(0, 3, 2), labels.narrow(0, 3, 2), options);
  CHECK_CLOSE((a.sum + b.sum) / (a.normalizer + b.normalizer), cross_entropy(x, labels, options), 1e-12);
  CHECK((a.normalizer + b.normalizer).item<double>() == 0.5 + 3 + 2 + 2);
}

TEST_CASE("mse_loss: shapes must be equal") {
  CHECK_ERROR(mse_loss(ones({2, 1}), ones({2})), "[mse_loss]", "{2, 1}", "{2}");
  CHECK(mse_loss(tensor({1.0, 3.0}), tensor({0.0, 0.0})).item<double>() == 5);
}

}  // namespace tandem::test
