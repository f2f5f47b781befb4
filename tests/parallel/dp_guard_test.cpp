// check_every of DataParallel, and the hash and the first difference that it and the ranks' guard use.
#include <limits>

#include <tandem/parallel/contents.h>
#include <tandem/tests/parallel/virtual_devices.h>

using namespace tandem;

namespace {

// In replica 1 a forward may give the weight memory of its own, which the optimizer does not reach: a copy, as on
// devices that do not share memory.
struct Forgetful : nn::Module {
  Tensor forward(const Tensor& x) override {
    if (forget && ReplicaScope::index() == 1) {
      const NoGradGuard no_grad;
      linear->weight.set_data(linear->weight.detach().clone());
    }
    return linear(x);
  }
  nn::Linear linear = register_module("linear", nn::Linear(3, 2));
  bool forget = false;
};

}  // namespace

TEST_CASE("check_every finds a replica that has another weight") {
  const test::Devices devices(2);
  const auto net = std::make_shared<Forgetful>();
  {
    const NoGradGuard no_grad;
    for (Tensor& p : net->parameters()) p.fill_(1);
  }
  parallel::DataParallel model(net, {.check_every = 2});
  const Tensor x = ones({4, 3}), y = zeros({4, 2});
  const nn::MSELoss criterion;
  auto loss = [&] { return model.loss(criterion, x, y); };
  for (int i = 1; i <= 4; ++i) loss().backward();
  net->forget = true;
  loss().backward();  // step 5: from here on replica 1 has its own
  net->forget = false;
  CHECK(test::error_of(loss) == "no error");  // a copy that is alike
  {
    const NoGradGuard no_grad;
    net->linear->weight.detach()[1][2].fill_(1.5);
  }
  CHECK(test::error_of(loss) == "no error");  // step 7 is not checked
  CHECK_ERROR(loss(),
              "[DataParallel] replica 1 on cpu:1 differs at step 8: element (1, 2) of parameter 'linear.weight' is 1.5 "
              "in the module, but 1 there; a forward has given it a value of its own");
  {
    const NoGradGuard no_grad;
    for (int i = 0; i < 4; ++i) CHECK(test::error_of([&] { model(x); }) == "no error");  // what is not recorded
  }
  CHECK(test::error_of([&] { model(x); }) == "no error");
  CHECK_ERROR(model(x), "replica 1 on cpu:1 differs at step 10");
}

TEST_CASE("check_every is a number of steps") {
  const test::Devices devices(2);
  CHECK_ERROR(parallel::DataParallel(test::make_net(), {.check_every = -3}),
              "[DataParallel] check_every is -3; give a number of steps, or 0 for never");
  parallel::DataParallel model(test::make_net(), {.check_every = 1});
  optim::Adam optimizer(model.parameters(), {.lr = 0.01});
  for (int i = 0; i < 20; ++i) {
    Tensor x = randn({5, 6}, {.dtype = float64});
    if (i == 10) x.fill_(std::numeric_limits<double>::quiet_NaN());
    sum(model(x)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST_CASE("a hash sees every bit") {
  for (const std::size_t size : {1, 7, 8, 63, 64, 65, 200}) {
    std::vector<std::byte> bytes(size);
    const std::uint64_t before = parallel::hash(bytes);
    CHECK(parallel::hash(bytes) == before);
    for (std::size_t bit = 0; bit < 8 * size; ++bit) {
      bytes[bit / 8] ^= std::byte(1u << bit % 8);
      CHECK(parallel::hash(bytes) != before);
      // Two changed bits at the same place of words that the same lane takes must not cancel.
      if (bit / 8 + 64 < size) {
        bytes[bit / 8 + 64] ^= std::byte(1u << bit % 8);
        CHECK(parallel::hash(bytes) != before);
        bytes[bit / 8 + 64] ^= std::byte(1u << bit % 8);
      }
      bytes[bit / 8] ^= std::byte(1u << bit % 8);
    }
    bytes.push_back({});
    CHECK(parallel::hash(bytes) != before);
  }
  CHECK(parallel::hash({}) == parallel::hash({}));
}

TEST_CASE("the first difference of two tensors") {
  const Tensor a = ones({2, 3}), b = ones({2, 3}).t().contiguous().t();
  CHECK_FALSE(parallel::first_difference(a, b));  // strides do not count
  CHECK(parallel::same_bits(a, b));
  CHECK_FALSE(parallel::first_difference(zeros({0, 3}), zeros({0, 3})));
  Tensor c = a.clone();
  c[1][0].fill_(-2);
  const auto found = parallel::first_difference(c, b);
  REQUIRE(found);
  CHECK(found->place == "element (1, 0)");
  CHECK(found->first == "-2");
  CHECK(found->other == "1");
  CHECK_FALSE(parallel::same_bits(b, c));
  CHECK(parallel::first_difference(tensor({3}).squeeze(), tensor({4}).squeeze())->place == "the value");
}
