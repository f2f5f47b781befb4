// check_every: one bit that differs is found at the next check and named; what is alike raises no alarm.
#include <limits>

#include <tandem/tests/parallel/ddp_cases.h>

namespace tandem::test {
namespace {

using parallel::DistributedDataParallel;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// What went wrong in `body`: the rank of the CommError and its text; -2 and nothing when all was well.
template <class Body>
std::pair<int, std::string> found_by(const Body& body) {
  try {
    body();
  } catch (const parallel::CommError& e) {
    return {e.rank(), e.what()};
  }
  return {-2, ""};
}

// Flips a bit of an element behind the back of the version counter.
void flip(const Tensor& t, std::int64_t element, int bit) {
  auto* bytes = static_cast<unsigned char*>(t.impl()->data()) + element * static_cast<std::int64_t>(size_of(t.dtype()));
  bytes[bit / 8] = static_cast<unsigned char>(bytes[bit / 8] ^ (1u << bit % 8));
}

// An element as every rank has it, as a text.
std::vector<std::string> of_ranks(const Group& group, const Tensor& t, std::int64_t element) {
  const NoGradGuard no_grad;
  Tensor all = empty({group->size()}, {.dtype = t.dtype()});
  group->all_gather(all, t.detach().reshape({-1}).slice(0, element, element + 1).clone()).wait();
  std::vector<std::string> texts;
  for (int r = 0; r < group->size(); ++r)
    texts.push_back(t.dtype() == float64 ? fmt::format("{}", all[r].item<double>())
                                         : fmt::format("{}", all[r].item<float>()));
  return texts;
}

void one_bit_of(const Group& group, DType dtype, int odd, int bit, bool marked) {
  const auto net = make_mlp(dtype);
  DistributedDataParallel ddp(net, {.process_group = group, .check_every = 3});
  optim::SGD optimizer(net->parameters(), {.lr = 0.01});
  auto step = [&](int i) {
    ddp.loss(nn::CrossEntropyLoss(), part(wave({8, 6}, i, dtype), group), part(labels(8, 4, i), group)).backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  for (int i = 1; i <= 4; ++i) step(i);
  const Tensor weight = net->parameters()[2];  // 4 rows of 16
  if (group->rank() == odd) {
    flip(weight, 18, bit);
    if (marked) Tensor(weight).mark_changed();
  }
  step(5);  // no check yet
  const auto [rank, text] = found_by([&] { step(6); });
  if (group->size() == 1) return require(text.empty(), "alone nothing can differ");
  const int other = group->size() == 2 ? 1 : odd, usual = other == 0 ? 1 : 0;
  const std::vector<std::string> values = of_ranks(group, weight, 18);
  const std::string expected = fmt::format(
      "rank {} of {}: the ranks differ at step 6: element (1, 2) of parameter '2.weight' is {} on rank {}, but {} on "
      "rank {}; they were alike before",
      group->rank(), group->size(), values[static_cast<std::size_t>(usual)], usual,
      values[static_cast<std::size_t>(other)], other);
  require(text.find(expected) == 0, fmt::format("'{}' begins with '{}'", text, expected));
  require(rank == other, "the exception carries the rank");
  if (group->rank() == odd) flip(weight, 18, bit);  // an update has changed both by as much
  parallel::broadcast_state(*net, group);
  for (int i = 7; i <= 9; ++i) step(i);  // all goes on, and is checked
}

void one_bit(const Group& group) {
  const int last = group->size() - 1;
  one_bit_of(group, float32, last, 0, true);
  one_bit_of(group, float32, 0, 30, false);
  one_bit_of(group, float32, last, 31, false);
  one_bit_of(group, float64, last, 1, false);
  one_bit_of(group, float64, 0, 63, true);
}

// Two types, one that only stores, and a parameter that is frozen.
struct Mixed : nn::Module {
  Mixed() {
    a = register_module("a", nn::Linear(6, 5));
    b = register_module("b", nn::Linear(5, 4));
    b->to(float64);
    half = register_parameter("half", zeros({3}, {.dtype = bfloat16}), false);
    for (Tensor& p : parameters()) {
      const NoGradGuard no_grad;
      p.copy_(wave(p.shape(), 2, p.dtype()));
    }
  }
  Tensor forward(const Tensor& x) override { return b(relu(a(x)).to(float64)); }
  nn::Linear a{nullptr}, b{nullptr};
  Tensor half;
};

// Differences that no comparison of values would see, or that values alone would not tell apart.
void bits_and_not_values(const Group& group) {
  const bool odd = group->rank() == group->size() - 1;
  const auto net = std::make_shared<Mixed>();
  DistributedDataParallel ddp(net, {.process_group = group, .check_every = 1});
  auto step = [&](int i) { mean(ddp(wave({2, 6}, i, float32))).backward(); };
  auto differs = [&](const std::string& what) {
    const std::string text = found_by([&] { step(0); }).second;
    require(group->size() == 1 ? text.empty() : text.find(what) != std::string::npos,
            fmt::format("'{}' is in '{}'", what, text));
  };
  const int last = group->size() - 1;
  auto write = [&](Tensor p, std::int64_t at, float usual, float other) {
    const NoGradGuard no_grad;
    p.detach().reshape({-1})[at].fill_(odd ? other : usual);
  };
  Tensor weight = net->a->weight;
  write(weight, 1, 0.0F, -0.0F);
  differs(fmt::format("element (0, 1) of parameter 'a.weight' is 0 on rank 0, but -0 on rank {}", last));
  write(weight, 1, -0.0F, -0.0F);
  write(weight, 2, kNan, kNan);
  step(1);
  if (odd) flip(weight, 2, 0);
  differs(
      fmt::format("element (0, 2) of parameter 'a.weight' is nan (0x7fc00000) on rank 0, but nan (0x7fc00001) on "
                  "rank {}",
                  last));
  if (odd) flip(weight, 2, 0);
  step(2);
  write(net->half, 2, 1, 1.5F);
  differs(fmt::format("element (2) of parameter 'half' is 1 on rank 0, but 1.5 on rank {}", last));
  write(net->b->bias, 3, 1, 2);  // the first in the order of registration is named
  differs("of parameter 'half'");
  write(net->half, 2, 1, 1);
  differs(fmt::format("element (3) of parameter 'b.bias' is 1 on rank 0, but 2 on rank {}", last));
}

// What all ranks have is no difference, whatever it is: a long training, and one whose weights are no numbers any more.
void no_false_alarm(const Group& group) {
  for (const bool nan : {false, true}) {
    const auto net = std::make_shared<Mixed>();
    DistributedDataParallel ddp(net, {.process_group = group, .check_every = 1});
    std::vector<Tensor> trained = net->parameters();
    std::erase_if(trained, [](const Tensor& p) { return !p.requires_grad(); });
    optim::Adam optimizer(trained, {.lr = 0.01});
    for (int i = 0; i < (nan ? 10 : 60); ++i) {
      Tensor x = part(wave({8, 6}, i, float32), group).clone();
      if (nan && i == 3 && x.numel() > 0) x.fill_(kNan);
      ddp.loss(nn::CrossEntropyLoss(), x, part(labels(8, 4, i), group)).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    require(std::isnan(net->b->weight.detach().reshape({-1})[0].item<double>()) == nan, "weights that are no numbers");
  }
}

// Forwards that are not synchronised send nothing, and do not count.
void steps_that_count(const Group& group) {
  const auto net = make_mlp();
  DistributedDataParallel ddp(net, {.process_group = group, .check_every = 2});
  const Tensor x = wave({2, 6}, 1);
  mean(ddp(x)).backward();
  if (group->rank() == group->size() - 1) flip(net->parameters()[1], 3, 40);
  {
    const auto apart = ddp.no_sync();
    for (int i = 0; i < 3; ++i) mean(ddp(x)).backward();
  }
  {
    const NoGradGuard no_grad;
    for (int i = 0; i < 3; ++i) (void)ddp(x);
  }
  const std::string text = found_by([&] { (void)ddp(x); }).second;
  require(group->size() == 1 ? text.empty() : text.find("at step 2: element (3) of parameter '0.bias'") != text.npos,
          "the second synchronised forward finds it");
}

void options(const Group& group) {
  require_error({"check_every is -1; give a number of steps, or 0 for never"},
                [&] { DistributedDataParallel ddp(make_mlp(), {.process_group = group, .check_every = -1}); });
  if (group->size() == 1) return;
  require_error({"option check_every: 5", "option check_every: 6"}, [&] {
    DistributedDataParallel ddp(make_mlp(), {.process_group = group, .check_every = group->rank() == 0 ? 5 : 6});
  });
}

}  // namespace

std::vector<DdpCase> guard_cases() {
  return {{"one bit of one weight on one rank", one_bit},
          {"bits and not values", bits_and_not_values},
          {"no false alarm", no_false_alarm},
          {"steps that count", steps_that_count},
          {"options of the guard", options}};
}

}  // namespace tandem::test
