// What reproducible_shards refuses, what its losses are, and how one rank's failure ends on all;
// reproducible_program compares the bits.
#include <tandem/tests/parallel/ddp_cases.h>
#include <tandem/tests/parallel/thread_ranks.h>
#include <tandem/tests/parallel/virtual_devices.h>

using namespace tandem;

using parallel::DataParallel;
using parallel::DataParallelOptions;
using parallel::DistributedDataParallel;
using parallel::DistributedDataParallelOptions;
using parallel::ProcessGroup;

namespace {

const nn::CrossEntropyLoss kCriterion;

DistributedDataParallelOptions in_parts(int shards) { return {.reproducible_shards = shards}; }

struct Case {
  Tensor x = test::wave({7, 6}, 1), y = test::labels(7, 4, 1);
};

// Two of its layers are used in turn.
struct Choosy : nn::Module {
  Choosy() {
    a = register_module("a", nn::Linear(6, 4));
    b = register_module("b", nn::Linear(6, 4));
    to(float64);
  }
  Tensor forward(const Tensor& x) override {
    if (x.size(0) == fails_with) throw Error("a bad day");
    return x[0][0].item<double>() > 0 ? a(x) : b(x);
  }
  nn::Linear a{nullptr}, b{nullptr};
  std::int64_t fails_with = -1;
};

Tensor positive(std::int64_t rows) { return abs(test::wave({rows, 6}, 1)) + 1.0; }

}  // namespace

// Sums over whole rows, where kernels may take other groups of elements together, next to products of many sizes. The
// kernels of x86 give the same bits anyhow, so that the place itself is looked at, too.
TEST_CASE("reproducible: where the parts of a batch begin in memory changes no bits") {
  struct Net : nn::Module {
    Net(std::int64_t in, std::int64_t out, DType dtype) : a(register_module("a", nn::Linear(in, out))) {
      to(dtype);
      test::fill(*this);
    }
    Tensor forward(const Tensor& x) override {
      CHECK(reinterpret_cast<std::uintptr_t>(x.raw().data) % 64 == 0);
      return a(x) + sum(x * 0.37, 1, true) + sum(log_softmax(x, 1), 1, true) + mean(x) + sum(exp(x), {0, 1});
    }
    nn::Linear a;
  };
  for (const DType dtype : {float32, float64})
    for (const std::int64_t in : {3, 18, 65, 1037})
      for (const std::int64_t out : {1, 3, 17})
        for (const std::int64_t rows : {4, 7, 150}) {
          const auto net = std::make_shared<Net>(in, out, dtype);
          DataParallel model(net, {.reproducible_shards = 4});
          const Tensor values = test::wave({rows, in}, 1, dtype), y = test::wave({rows, out}, 2, dtype);
          std::vector<double> first;
          for (const std::int64_t offset : {0, 1, 2, 3, 5, 8}) {
            CAPTURE(dtype == float32);
            CAPTURE(in);
            CAPTURE(out);
            CAPTURE(rows);
            CAPTURE(offset);
            Tensor x = zeros({values.numel() + offset}, {.dtype = dtype})
                           .narrow(0, offset, values.numel())
                           .view(values.shape());
            x.copy_(values);
            net->zero_grad();
            const Tensor loss = model.loss(nn::MSELoss(), x, y);
            loss.backward();
            std::vector<double> seen = net->a->weight.grad().to_vector<double>();
            seen.push_back(loss.item<double>());
            if (first.empty()) first = seen;
            CHECK(seen == first);
          }
        }
}

TEST_CASE("reproducible: what DataParallel refuses") {
  const test::Devices devices(4);
  const auto net = test::make_net();
  const auto wrap = [&](const DataParallelOptions& options) { return [=] { DataParallel model(net, options); }; };
  CHECK_ERROR(wrap({.reproducible_shards = 3})(), "reproducible_shards is 3; give a power of two, at most 2048");
  CHECK_ERROR(wrap({.reproducible_shards = 4096})(), "at most 2048");
  CHECK_ERROR(wrap({.reproducible_shards = -2})(), "reproducible_shards is -2");
  CHECK_ERROR(wrap({.device_ids = {0, 1, 2}, .reproducible_shards = 4})(),
              "3 devices cannot share reproducible_shards = 4 parts evenly; use 1, 2, 4, ... devices");
  CHECK_ERROR(wrap({.replicas = 4, .reproducible_shards = 4})(), "leave out replicas, part_sizes and dim");
  CHECK_ERROR(wrap({.part_sizes = {1, 1, 1, 1}, .reproducible_shards = 4})(), "leave out replicas");
  CHECK_ERROR(wrap({.dim = 1, .reproducible_shards = 4})(), "leave out replicas");
  const Case c;
  CHECK_ERROR(parallel::data_parallel(net, c.x, {.reproducible_shards = 4}), "needs a DataParallel");
  DataParallel model(net, {.device_ids = {0, 1}, .reproducible_shards = 4});
  CHECK_ERROR(model(c.x), "trained through loss(criterion, x, y)");
  CHECK_ERROR(model.loss(nn::CrossEntropyLoss({.reduction = Reduction::none}), c.x, c.y), "a loss is one number");
  const auto rows = [](const Tensor& output, const Tensor&) { return output; };
  CHECK_ERROR(model.loss(rows, Reduction::none, c.x, c.y), "a loss is one number");
  CHECK_ERROR(model.loss(rows, Reduction::mean, c.x, c.y), "gave a tensor of shape", "a mean or a sum is one number");
  CHECK_ERROR(model.loss(kCriterion, c.x, c.y.narrow(0, 0, 5)), "different numbers of rows");
  const NoGradGuard no_grad;
  CHECK_CLOSE(model(c.x), (*net)(c.x), 1e-12);
}

TEST_CASE("reproducible: the loss and its gradients are those of the whole batch") {
  const test::Devices devices(2);
  for (const bool is_mean : {true, false})
    for (const std::int64_t rows : {7, 3, 1, 0}) {
      const Case c;
      const Tensor x = c.x.narrow(0, 0, rows).detach().requires_grad_(), y = c.y.narrow(0, 0, rows);
      const auto net = test::make_net(), alone = test::make_net();
      DataParallel model(net, {.reproducible_shards = 4});
      const nn::CrossEntropyLoss criterion(
          {.weight = test::wave({4}, 2) + 2.0, .reduction = is_mean ? Reduction::mean : Reduction::sum});
      const Tensor loss = model.loss(criterion, x, y);
      loss.backward();
      const Tensor given = x.grad().clone();
      x.grad().zero_();
      const Tensor expected = criterion((*alone)(x), y);
      expected.backward();
      CHECK_CLOSE(loss.detach(), expected.detach(), 1e-12);
      CHECK_CLOSE(given, x.grad(), 1e-12);
      for (std::size_t i = 0; i < 4; ++i)
        CHECK_CLOSE(net->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-12);
      const NoGradGuard no_grad;
      CHECK(model.loss(criterion, x, y).item<double>() == loss.item<double>());
    }
}

TEST_CASE("reproducible: operations keep to one thread in their backward") {
  const test::Threads threads(4);
  Tensor x = ones({2}, {.dtype = float64}).requires_grad_(), y;
  int forward = 0, backward = 0;
  {
    const SingleThreadScope one_thread;
    forward = threads_per_device();
    y = x * 2.0;
  }
  const autograd::HookHandle hook = autograd::register_hook(y, [&](const Tensor&) {
    backward = threads_per_device();
    return Tensor();
  });
  CHECK(threads_per_device() == 4);
  y.backward(ones({2}, {.dtype = float64}));
  CHECK(forward == 1);
  CHECK(backward == 1);
  CHECK(threads_per_device() == 4);
}

TEST_CASE("reproducible: what DistributedDataParallel refuses") {
  test::on_ranks(3, [](ProcessGroup&) {
    test::require_error({"3 ranks cannot share reproducible_shards = 4 parts evenly"},
                        [] { DistributedDataParallel ddp(test::make_mlp(), in_parts(4)); });
  });
  test::on_ranks(2, [](ProcessGroup& group) {
    test::require_error({"reproducible_shards is 6; give a power of two"},
                        [] { DistributedDataParallel ddp(test::make_mlp(), in_parts(6)); });
    test::require_error({"needs broadcast_buffers"}, [] {
      DistributedDataParallel ddp(test::make_mlp(), {.broadcast_buffers = false, .reproducible_shards = 4});
    });
    test::require_error({"the ranks differ: rank 0 has option reproducible_shards: 2"},
                        [&] { DistributedDataParallel ddp(test::make_mlp(), in_parts(group.rank() == 0 ? 2 : 4)); });
    DistributedDataParallel ddp(test::make_mlp(), in_parts(4));
    const Case c;
    test::require_error({"trained through loss(criterion, x, y)"}, [&] { ddp(c.x); });
    test::require_error({"a communication hook is not for reproducible_shards"},
                        [&] { ddp.register_comm_hook(parallel::fp16_compress_hook()); });
    test::require_error({"no_sync is not for reproducible_shards"}, [&] { (void)ddp.no_sync(); });
    test::require_error({"a loss is one number"},
                        [&] { ddp.loss(nn::CrossEntropyLoss({.reduction = Reduction::none}), c.x, c.y); });
    const auto differ = [&](std::initializer_list<std::string> parts, const Tensor& x, const Tensor& y) {
      test::require_error(parts, [&] { ddp.loss(kCriterion, x, y); });
    };
    const bool odd = group.rank() == 1;
    differ({fmt::format("rank {} of 2: ", group.rank()), "every rank gives the whole batch", "rank 0 gave 7 rows and",
            "rank 1 gave 5"},
           c.x.narrow(0, 0, odd ? 5 : 7), c.y.narrow(0, 0, odd ? 5 : 7));
    differ({"rank 1 gave another one than rank 0"}, odd ? c.x + 1.0 : c.x, c.y);
    differ({"rank 1 gave another one than rank 0"}, c.x, odd ? test::labels(7, 4, 2) : c.y);
    const nn::CrossEntropyLoss of_sum({.reduction = Reduction::sum});
    const nn::NLLLoss other;
    for (const nn::Loss* criterion : std::initializer_list<const nn::Loss*>{&of_sum, &other})
      test::require_error(
          {fmt::format("the ranks differ: rank 0 has loss: {}, where rank 1 has loss: {}; call loss with "
                       "the same criterion and options on every rank",
                       kCriterion.str(), criterion->str())},
          [&] { ddp.loss(odd ? *criterion : kCriterion, c.x, c.y); });
    test::require_error({"every rank computes the same loss, but rank 1 is under NoGradGuard"}, [&] {
      const GradModeGuard recording(!odd);
      ddp.loss(kCriterion, c.x, c.y);
    });
    const Tensor computed = (c.x * 1.0).requires_grad_();
    test::require_error({"the input and the target must not require grad"},
                        [&] { ddp.loss(kCriterion, computed, c.y); });
    test::require_error(
        {fmt::format("rank {0} of 2, part {1} of 4", group.rank(), odd ? 2 : 0), "the loss function gave an int64"},
        [&] { ddp.loss([](const Tensor&, const Tensor& target) { return sum(target); }, Reduction::sum, c.x, c.y); });
    ddp.loss(kCriterion, c.x, c.y).backward();  // and goes on
    const NoGradGuard no_grad;
    CHECK_CLOSE(ddp(c.x), (*ddp.module())(c.x), 1e-12);
  });
}

TEST_CASE("reproducible: a rank that fails is an error on all, and the next step works") {
  test::on_ranks(2, [](ProcessGroup& group) {
    const auto net = std::make_shared<Choosy>();
    DistributedDataParallel ddp(net, {.find_unused_parameters = true, .reproducible_shards = 4});
    const Tensor x = positive(7), y = test::labels(7, 4, 1);
    const bool odd = group.rank() == 1;
    const auto step = [&] { ddp.loss(kCriterion, x, y).backward(); };
    step();
    if (odd) net->fails_with = 1;  // the last part has one row
    const std::string text = test::require_error({"a bad day"}, step);
    test::require(text.find("rank 1 of 2, part 3 of 4 with rows 6 to 6") != std::string::npos, text);
    net->fails_with = -1;
    step();
    const auto throws = [&](const Tensor& output, const Tensor&) {
      if (odd) throw 5;
      return mean(output);
    };
    try {
      ddp.loss(throws, Reduction::mean, x, y);
      test::require(false, "no rank goes on");
    } catch (const parallel::CommError& e) {
      test::require(!odd && std::string(e.what()).find("an exception of an unknown type") != std::string::npos,
                    e.what());
    } catch (int) {
      test::require(odd, "the exception is rank 1's");
    }
    step();
    if (odd)
      (void)test::require_error({"different numbers of rows"}, [&] { ddp.loss(kCriterion, x, y.narrow(0, 0, 1)); });
    if (!odd) (void)test::require_error({"different numbers of rows"}, step);
    step();
    // In backward.
    Tensor loss = ddp.loss(kCriterion, x, y);
    autograd::HookHandle hook;
    const auto function = [&](const Tensor& output, const Tensor& target) {
      if (odd) hook = autograd::register_hook(output, [](const Tensor&) -> Tensor { throw Error("in backward"); });
      return mean(pow(output, 2)) + mean(target.to(float64));
    };
    loss = ddp.loss(function, Reduction::mean, x, y);
    test::require_error({odd ? "in backward" : "rank 1 of 2: its backward ended with an error"},
                        [&] { loss.backward(); });
    ddp.zero_grad();
    step();
    test::require(net->a->weight.grad().defined() && !net->b->weight.grad().defined(), "what no part reaches is left");
  });
}

TEST_CASE("reproducible: errors of one rank leave the comparisons of check_every in step") {
  test::on_ranks(2, [](ProcessGroup& group) {
    const auto net = test::make_mlp();
    DistributedDataParallel ddp(net, {.check_every = 2, .reproducible_shards = 2});
    const Case c;
    const auto step = [&] { ddp.loss(kCriterion, c.x, c.y).backward(); };
    const bool odd = group.rank() == 1;
    Tensor weight = net->parameters().front();
    step();
    if (odd) weight.requires_grad_(false);
    test::require_error({"frozen after the model was wrapped"}, step);
    weight.requires_grad_(true);
    const NoGradGuard writing;
    if (odd) weight.add_(1.0);
    const GradModeGuard recording(true);
    test::require_error({"the ranks differ at step 2"}, step);
    step();
    test::require_error({"the ranks differ at step 4"}, step);
  });
}

TEST_CASE("reproducible: a forward of its own leaves the numbers of training and of the program alone") {
  const test::Devices devices(2);
  const auto numbers = [](auto& model, auto alike) {
    alike([] { manual_seed(7); });
    const Case c;
    {
      const NoGradGuard no_grad;
      (void)model(c.x);
    }
    const double loss = model.loss(kCriterion, c.x, c.y).template item<double>();
    alike([] {});
    return std::pair(loss, random_state().positions.front());
  };
  const auto make = [] {
    auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(6, 16), nn::Dropout(0.5), nn::Linear(16, 4));
    net->to(float64);
    test::fill(*net);
    return net;
  };
  const auto at_once = [](auto body) { body(); };
  std::vector<std::pair<double, std::uint64_t>> found;
  for (const int count : {1, 2}) {
    std::vector<Device> on;
    for (int i = 0; i < count; ++i) on.emplace_back(DeviceType::cpu, i);
    DataParallel model(make(), {.device_ids = on, .reproducible_shards = 2});
    found.push_back(numbers(model, at_once));
  }
  test::on_ranks(2, [&](ProcessGroup& group) {
    DistributedDataParallel model(make(), in_parts(2));
    const auto together = [&](auto body) {
      group.barrier().wait();
      if (group.rank() == 0) body();
      group.barrier().wait();
    };
    const auto mine = numbers(model, together);
    if (group.rank() == 0) found.push_back(mine);
  });
  for (const auto& one : found) CHECK(one == std::pair(found.front().first, std::uint64_t{0}));
}

TEST_CASE("reproducible: a parameter that no part reaches is named on every rank") {
  test::on_ranks(2, [](ProcessGroup& group) {
    DistributedDataParallel ddp(std::make_shared<Choosy>(), in_parts(2));
    test::require_error({fmt::format("rank {} of 2: parameters 'b.weight', 'b.bias' got no gradient", group.rank()),
                         "find_unused_parameters"},
                        [&] { ddp.loss(kCriterion, positive(4), test::labels(4, 4, 1)).backward(); });
    // One that a part of the other rank reaches has its gradient here too.
    const Tensor x = cat({positive(2), positive(2) * -1.0});
    ddp.loss(kCriterion, x, test::labels(4, 4, 1)).backward();
    for (const Tensor& p : ddp.parameters()) test::require(p.grad().defined(), "every parameter has its gradient");
  });
}
