// Softmax and losses on a CUDA device: values and gradients, and labels and indices that only the device can check.
#include <tandem/nn/loss.h>
#include <tandem/tests/cuda/cuda_device.h>
#include <tandem/tests/support/test.h>

#include <cmath>

#include <tandem/tensor/cuda.h>

namespace tandem {
namespace {

using test::kCuda;

Tensor leaf(const Tensor& x, Device device) { return x.to(device).clone().detach().requires_grad_(); }

TEST_CASE("cuda: softmax of rows of many lengths") {
  for (const int64_t k : {1, 10, 200, 5000}) {
    const Tensor x = randn({5, k}) * 4, g = randn({5, k});
    for (const bool log : {false, true}) {
      const Tensor here = leaf(x, "cpu"), there = leaf(x, kCuda);
      const Tensor a = log ? log_softmax(here, 1) : softmax(here, 1);
      const Tensor b = log ? log_softmax(there, 1) : softmax(there, 1);
      CHECK_CLOSE(b.detach().to("cpu"), a.detach(), 1e-5);
      a.backward(g);
      b.backward(g.to(kCuda));
      CHECK_CLOSE(there.grad().to("cpu"), here.grad(), 1e-5);
    }
  }
}

TEST_CASE("cuda: cross entropy with weights, smoothing and ignored labels, combined in each way") {
  for (const int64_t rows : {1, 70, 20000}) {
    const int64_t classes = 11;
    const Tensor x = randn({rows, classes}), weight = rand({classes}) + 0.5;
    const Tensor labels = (rand({rows}) * 11).to(int64);
    for (const bool weighted : {false, true}) {
      for (const double smoothing : {0.0, 0.1}) {
        for (const Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none}) {
          const nn::CrossEntropyLoss loss({.weight = weighted ? weight : Tensor(),
                                           .ignore_index = 3,
                                           .reduction = reduction,
                                           .label_smoothing = smoothing});
          Tensor here = leaf(x, "cpu"), there = leaf(x, kCuda);
          const Tensor a = loss(here, labels), b = loss(there, labels.to(kCuda));
          CHECK_CLOSE(b.detach().to("cpu"), a.detach(), 1e-5);
          sum(a * a).backward();
          sum(b * b).backward();
          const double scale = 1 + max(abs(here.grad())).item<double>();
          CHECK_CLOSE(there.grad().to("cpu") / scale, here.grad() / scale, 1e-5);
        }
      }
    }
  }
}

TEST_CASE("cuda: the mean of nothing is 0, with gradient 0") {
  for (const Device device : {Device("cpu"), kCuda}) {
    Tensor x = leaf(randn({3, 4}), device);
    const Tensor loss = cross_entropy(x, full({3}, -100, {.device = device}));
    CHECK(loss.item<float>() == 0);
    loss.backward();
    CHECK(equal(x.grad(), zeros({3, 4}, {.device = device})));
    Tensor none = leaf(zeros({0, 4}), device);
    const Tensor empty_loss = cross_entropy(none, zeros({0}, {.dtype = int64, .device = device}));
    CHECK(empty_loss.item<float>() == 0);
    empty_loss.backward();
    CHECK(none.grad().shape() == Shape{0, 4});
  }
}

TEST_CASE("cuda: a label out of range is named when the host next waits, and then forgotten") {
  const Tensor x = randn({4, 10});
  const char* const text = "[cross_entropy] label 12 at row 2 is out of range: the logits have 10 classes, so labels";
  const Tensor labels = tensor({1, 2, 12, 4});
  CHECK_ERROR(cross_entropy(x, labels), text);
  Tensor there = leaf(x, kCuda);
  Tensor loss = cross_entropy(there, labels.to(kCuda));
  CHECK_ERROR(loss.item<float>(), text);
  CHECK(std::isnan(loss.item<float>()));
  // The other rows have their gradient, so that parameters stay finite.
  loss.backward();
  const Tensor gradient = there.grad().to("cpu");
  CHECK(equal(gradient[2], zeros({10})));
  CHECK(std::isfinite(sum(gradient).item<float>()));
  CHECK(max(gradient).item<float>() > 0);
  loss = cross_entropy(there, tensor({-1, 0, 0, 0}).to(kCuda));
  CHECK_ERROR(cuda::synchronize(kCuda), "label -1 at row 0 is out of range");
  cuda::synchronize(kCuda);
  if (cuda::device_count() < 2) return;
  // Each device has its own.
  loss = cross_entropy(x.to("cuda:1"), labels.to("cuda:1"));
  cuda::synchronize(kCuda);
  CHECK_ERROR(cuda::synchronize("cuda:1"), text);
}

TEST_CASE("cuda: nll_loss and its labels") {
  const Tensor x = log_softmax(randn({5, 6}), 1), weight = rand({6});
  const Tensor labels = tensor({0, 5, -100, 2, 3});
  Tensor here = leaf(x, "cpu"), there = leaf(x, kCuda);
  const Tensor a = nll_loss(here, labels, {.weight = weight});
  const Tensor b = nll_loss(there, labels.to(kCuda), {.weight = weight.to(kCuda)});
  CHECK_CLOSE(b.detach().to("cpu"), a.detach(), 1e-6);
  a.backward();
  b.backward();
  CHECK_CLOSE(there.grad().to("cpu"), here.grad(), 1e-6);
  const Tensor wrong = tensor({0, 5, 6, 2, 3});
  const char* const text =
      "[nll_loss] label 6 at row 2 is out of range: there are 6 classes, so labels run from 0 to 5";
  CHECK_ERROR(nll_loss(x, wrong), text);
  const Tensor loss = nll_loss(there, wrong.to(kCuda));
  CHECK_ERROR(loss.item<float>(), text);
}

TEST_CASE("cuda: indices out of range are named when the host next waits") {
  const Tensor x = randn({4, 3}).to(kCuda), index = tensor({0, 4}).to(kCuda);
  const Tensor selected = index_select(x, 0, index);
  CHECK_ERROR(cuda::synchronize(kCuda), "[index_select] index 4 is out of range 0 to 3");
  const Tensor gathered = gather(x, 0, tensor({{0, 1, -1}}).to(kCuda));
  CHECK_ERROR(cuda::synchronize(kCuda), "[gather] index -1 is out of range 0 to 3");
  const Tensor hot = one_hot(index, 4);
  CHECK_ERROR(cuda::synchronize(kCuda), "[one_hot] index 4 is out of range 0 to 3");
  cuda::synchronize(kCuda);
}

TEST_CASE("cuda: the gradients of bias and ReLU, of few and of many rows") {
  for (const DType dtype : {float32, float64}) {
    for (const int64_t rows : {0, 1, 64, 1000}) {
      for (const bool relu : {false, true}) {
        const Tensor x = randn({rows, 5}, {.dtype = dtype}), w = randn({70, 5}, {.dtype = dtype});
        const Tensor bias = randn({70}, {.dtype = dtype}), g = randn({rows, 70}, {.dtype = dtype});
        std::vector<Tensor> gradients;
        for (const Device device : {Device("cpu"), kCuda}) {
          Tensor here[] = {leaf(x, device), leaf(w, device), leaf(bias, device)};
          linear(here[0], here[1], here[2], relu).backward(g.to(device));
          for (const Tensor& t : here) gradients.push_back(t.grad().to("cpu"));
        }
        for (std::size_t i = 0; i < 3; ++i) CHECK_CLOSE(gradients[i + 3], gradients[i], 1e-4);
      }
    }
  }
}

}  // namespace
}  // namespace tandem
