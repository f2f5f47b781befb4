// The losses against numbers computed with PyTorch in float64, and how they combine from parts.
#include <tandem/nn/loss.h>
#include <tandem/tests/support/test.h>

#include <cmath>

using namespace tandem;

namespace {

const TensorOptions kDouble{.dtype = float64};
Tensor logits() {
  return tensor({{1., 2., 0.5}, {0.1, -1., 2.}, {0.3, 0.2, 0.1}, {-2., 1., 1.5}},
                {.dtype = float64, .requires_grad = true});
}
const Tensor& labels() {
  static const Tensor t = tensor({1, 2, 0, 1});
  return t;
}
const Tensor& weight() {
  static const Tensor t = tensor({0.5, 2., 1.25}, kDouble);
  return t;
}

struct Case {
  bool weighted;
  int64_t ignore_index;
  double label_smoothing;
  double mean, sum;
  std::vector<double> rows, gradient;  // of the mean with respect to the last row

  CrossEntropyOptions options(Reduction reduction = Reduction::mean) const {
    return {.weight = weighted ? weight() : Tensor(),
            .ignore_index = ignore_index,
            .reduction = reduction,
            .label_smoothing = label_smoothing};
  }
};
const Case kCases[] = {
    {false,
     -100,
     0,
     0.6601988178146501,
     2.6407952712586003,
     {0.4643687841079449, 0.18178448558911336, 1.0019428482292443, 0.9926991533322977},
     {0.004612461970847509, -0.15735622477774341, 0.15274376280689592}},
    {true,
     -100,
     0,
     0.6334500706054781,
     3.642337905981499,
     {0.9287375682158898, 0.2272306069863917, 0.5009714241146221, 1.9853983066645955},
     {0.006417338394222621, -0.21893039969077346, 0.21251306129655084}},
    {false,
     0,
     0,
     0.5462841410097853,
     1.638852423029356,
     {0.4643687841079449, 0.18178448558911336, 0.0, 0.9926991533322977},
     {0.006149949294463345, -0.20980829970365789, 0.20365835040919456}},
    {true,
     0,
     0,
     0.5983555203555957,
     3.141366481866877,
     {0.9287375682158898, 0.2272306069863917, 0.0, 1.9853983066645955},
     {0.007028513479386681, -0.2397809139470376, 0.23275240046765092}},
    {false,
     -100,
     0.1,
     0.74519881781465,
     2.9807952712586,
     {0.5477021174412783, 0.34511781892244675, 1.0119428482292443, 1.0760324866656312},
     {-0.003720871362485824, -0.14068955811107675, 0.14441042947356258}},
    {true,
     -100,
     0.1,
     0.6892527868331607,
     3.9632035242906745,
     {0.9730765760744606, 0.4588972736530583, 0.5911171377318155, 1.9401125368313399},
     {0.003278137479801592, -0.2005755821661376, 0.19729744468633598}},
    {true,
     0,
     0.2,
     0.6862488173811125,
     3.602806291250841,
     {1.0174155839330314, 0.690563940319725, 0.0, 1.8948267669980843},
     {0.00015216861922633083, -0.1995751231787876, 0.19942295455956124}},
};

}  // namespace

TEST_CASE("cross entropy: reductions, class weights, ignored labels, smoothing, gradients") {
  for (const Case& c : kCases) {
    CAPTURE(c.mean);
    const Tensor x = logits();
    const Tensor loss = nn::CrossEntropyLoss(c.options())(x, labels());
    CHECK(loss.item<double>() == doctest::Approx(c.mean).epsilon(1e-12));
    loss.backward();
    CHECK_CLOSE(x.grad()[3], tensor(c.gradient), 1e-12);
    const LossParts parts = nn::CrossEntropyLoss(c.options()).parts(x, labels());
    CHECK(parts.sum.item<double>() / parts.normalizer.item<double>() == doctest::Approx(c.mean).epsilon(1e-12));

    CHECK(nn::CrossEntropyLoss(c.options(Reduction::sum))(x, labels()).item<double>() ==
          doctest::Approx(c.sum).epsilon(1e-12));
    const nn::CrossEntropyLoss rows(c.options(Reduction::none));
    CHECK_CLOSE(rows(x, labels()), tensor(c.rows), 1e-12);
    CHECK(rows.reduction() == Reduction::none);
    CHECK(rows.parts(x, labels()).sum.item<double>() == doctest::Approx(c.sum).epsilon(1e-12));
  }
}

TEST_CASE("cross entropy: parts of a batch combine to the loss of the whole, values and gradients") {
  for (const Case& c : kCases) {
    CAPTURE(c.mean);
    const nn::CrossEntropyLoss loss(c.options());
    const Tensor x = logits();
    const LossParts a = loss.parts(x.narrow(0, 0, 1), labels().narrow(0, 0, 1));
    const LossParts b = loss.parts(x.narrow(0, 1, 3), labels().narrow(0, 1, 3));
    const Tensor total = (a.sum + b.sum) / (a.normalizer + b.normalizer);
    CHECK(total.item<double>() == doctest::Approx(c.mean).epsilon(1e-12));
    total.backward();
    CHECK_CLOSE(x.grad()[3], tensor(c.gradient), 1e-12);
  }
}

TEST_CASE("cross entropy: the mean has the bits of the sum times the inverse of the normaliser, as from parts") {
  for (const bool weighted : {false, true}) {
    for (const int64_t rows : {1, 7, 3001}) {
      const nn::CrossEntropyLoss loss({.weight = weighted ? rand({5}) + 0.1 : Tensor(), .ignore_index = 2});
      const Tensor x = randn({rows, 5}), y = (rand({rows}) * 5).to(int64);
      const Tensor a = x.clone().requires_grad_(), b = x.clone().requires_grad_();
      const Tensor whole = loss(a, y);
      const LossParts parts = loss.parts(b, y);
      const Tensor combined = mean_of_parts(parts.sum, parts.normalizer.item<double>());
      CHECK(equal(whole.detach(), combined.detach()));
      (whole * 3).backward();
      (combined * 3).backward();
      CHECK(equal(a.grad(), b.grad()));
    }
  }
}

TEST_CASE("cross entropy: a label out of range is named") {
  const Tensor x = tensor({{2.5, 0.0, 0.0}, {0.0, 0.0, 2.5}});
  const nn::CrossEntropyLoss loss;
  CHECK_ERROR(loss(x, tensor({0, 1000})), "[cross_entropy]", "1000", "3 classes");
  CHECK_ERROR(loss(x, tensor({-1, 0})), "-1", "3 classes");
  CHECK_ERROR(loss.parts(x, tensor({0, 3})), "label 3", "3 classes");
  CHECK_ERROR(loss(x, tensor({0.0, 1.0})), "the labels are float32", ".to(int64)");
  CHECK_ERROR(loss(x, tensor({0})), "one label a row", "{2, 3}", "{1}");
  CHECK_ERROR(loss(tensor({1.0, 2.0}), tensor({0})), "{rows, classes}", "{2}");
  CHECK_ERROR(nn::CrossEntropyLoss({.weight = ones({2})})(x, tensor({0, 1})), "weight", "{2}");
  CHECK_ERROR(nn::CrossEntropyLoss({.label_smoothing = 2})(x, tensor({0, 1})), "label_smoothing is 2");
}

TEST_CASE("cross entropy: all ignored, or no rows, gives 0 and gradient 0") {
  for (const Reduction reduction : {Reduction::mean, Reduction::sum}) {
    const nn::CrossEntropyLoss loss({.reduction = reduction});
    const Tensor x = ones({3, 3}, {.requires_grad = true}), none = ones({0, 3}, {.requires_grad = true});
    const Tensor ignored = loss(x, full({3}, -100)), empty_batch = loss(none, zeros({0}, {.dtype = int64}));
    CHECK(ignored.item<float>() == 0);
    CHECK(empty_batch.item<float>() == 0);
    ignored.backward();
    empty_batch.backward();
    CHECK(equal(x.grad(), zeros({3, 3})));
    CHECK(none.grad().shape() == Shape{0, 3});
    CHECK(loss.parts(x, full({3}, -100)).normalizer.item<float>() == 0);
  }
}

TEST_CASE("cross entropy: class weights follow the logits to their device") {
  set_cpu_device_count(2);
  const nn::CrossEntropyLoss loss({.weight = weight()});
  const Tensor there = loss(logits().detach().to("cpu:1"), labels().to("cpu:1"));
  CHECK(there.device() == Device("cpu:1"));
  CHECK(there.item<double>() == doctest::Approx(kCases[1].mean));
  CHECK_ERROR(loss(logits(), labels().to("cpu:1")), "cpu:0", "cpu:1");
  set_cpu_device_count(1);
}

TEST_CASE("negative log likelihood") {
  const Tensor log_p = log_softmax(logits(), 1);
  CHECK(nn::NLLLoss()(log_p, labels()).item<double>() == doctest::Approx(0.6601988178146501).epsilon(1e-12));
  CHECK(nn::NLLLoss({.weight = weight()})(log_p, labels()).item<double>() ==
        doctest::Approx(0.6334500706054781).epsilon(1e-12));
  const nn::NLLLoss loss({.weight = weight(), .ignore_index = 1});
  CHECK(loss(log_p, labels()).item<double>() == doctest::Approx(0.41611544634343645).epsilon(1e-12));
  const LossParts parts = loss.parts(log_p, labels());
  CHECK(parts.sum.item<double>() == doctest::Approx(0.7282020311010138).epsilon(1e-12));
  CHECK(parts.normalizer.item<double>() == doctest::Approx(1.75));
  CHECK_CLOSE(
      nn::NLLLoss({.weight = weight(), .reduction = Reduction::none})(log_p, labels()),
      tensor(std::vector<double>{0.9287375682158898, 0.2272306069863917, 0.5009714241146221, 1.9853983066645955}),
      1e-12);
  CHECK_ERROR(loss(log_p, tensor({0, 0, 5, 0})), "[nll_loss]", "label 5 at row 2", "3 classes");
}

TEST_CASE("squared error") {
  const Tensor x = tensor({{1.0, 2.0}, {3.0, 4.0}}), y = tensor({{0.0, 2.0}, {5.0, 1.0}});
  CHECK(nn::MSELoss()(x, y).item<double>() == 3.5);
  CHECK(nn::MSELoss({.reduction = Reduction::sum})(x, y).item<double>() == 14);
  CHECK(equal(nn::MSELoss({.reduction = Reduction::none})(x, y), tensor({{1.0, 0.0}, {4.0, 9.0}})));
  const LossParts parts = nn::MSELoss().parts(x, y);
  CHECK(parts.sum.item<double>() == 14);
  CHECK(parts.normalizer.item<double>() == 4);
  CHECK_ERROR(nn::MSELoss()(x, tensor({1.0, 2.0})), "[mse_loss]", "{2, 2}", "{2}");
}

TEST_CASE("losses say what they are") {
  CHECK(nn::MSELoss().str() == "MSELoss(reduction=mean)");
  CHECK(nn::CrossEntropyLoss({.reduction = Reduction::sum, .label_smoothing = 0.1}).str() ==
        "CrossEntropyLoss(reduction=sum, ignore_index=-100, label_smoothing=0.1)");
  CHECK(nn::NLLLoss({.weight = weight(), .ignore_index = 2}).str() ==
        "NLLLoss(reduction=mean, ignore_index=2, weight=[0.5, 2, 1.25])");
  // Many weights in short, and still each counts.
  Tensor many = ones({1000});
  const std::string text = nn::NLLLoss({.weight = many}).str();
  CHECK(text.find("weight=1000 numbers with the hash ") != std::string::npos);
  many[999].fill_(2);
  CHECK(nn::NLLLoss({.weight = many}).str() != text);
  struct Own : nn::Loss {
    Own() : Loss(Reduction::none) {}
    Tensor operator()(const Tensor& x, const Tensor&) const override { return x; }
    LossParts parts(const Tensor& x, const Tensor&) const override { return {x, x}; }
  };
  CHECK(Own().str() == "Own(reduction=none)");
}

TEST_CASE("losses are used through their base class") {
  const nn::MSELoss mse({.reduction = Reduction::sum});
  const nn::Loss& loss = mse;
  CHECK(loss.reduction() == Reduction::sum);
  CHECK(loss(ones({2}), zeros({2})).item<double>() == 2);
}
