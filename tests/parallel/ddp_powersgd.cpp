// PowerSGD: what is sent, what is kept for the next step, and the state from which a run goes on.
#include <limits>

#include <tandem/tests/parallel/ddp_cases.h>
#include <tandem/tests/parallel/job_file.h>
#include <tandem/tests/parallel/spy_group.h>

namespace tandem::test {
namespace {

using parallel::CommHook;
using parallel::DistributedDataParallel;
using parallel::GradBucket;
using parallel::PowerSGD;
using parallel::PowerSGDOptions;

// A bucket of one matrix {rows, cols} and a vector of 3, without a model.
struct Bucket {
  explicit Bucket(DType dtype, std::int64_t rows = 12, std::int64_t cols = 10)
      : buffer(zeros({rows * cols + 3}, {.dtype = dtype})),
        matrix(buffer.narrow(0, 0, rows * cols).view({rows, cols})),
        vector(buffer.narrow(0, rows * cols, 3)),
        bucket(0, true, buffer, {"matrix", "vector"}, {matrix, vector}) {}
  void run(const CommHook& hook, const Tensor& gradient) {
    matrix.copy_(gradient);
    vector.fill_(gradient.to_vector<double>()[0]);
    hook.run(bucket).wait();
  }
  Tensor buffer, matrix, vector;
  GradBucket bucket;
};

double distance(const Tensor& a, const Tensor& b) { return norm(a - b).item<double>(); }

Tensor gradient_of(int rank, int step, DType dtype) { return wave({12, 10}, rank + 0.7 * step, dtype); }

// What was given and not kept back is the sum of all gradients: nothing is lost.
void error_feedback(const Group& group) {
  for (const DType dtype : {float32, float64})
    for (const std::int64_t rank : {1, 2, 3})
      for (const bool warm : {true, false}) {
        PowerSGD powersgd({.matrix_approximation_rank = rank,
                           .start_powersgd_iter = 0,
                           .min_compression_rate = 1,
                           .warm_start = warm},
                          group);
        const CommHook hook = powersgd.hook();
        Bucket bucket(dtype);
        Tensor given = zeros({12, 10}, {.dtype = dtype}), expected = zeros({12, 10}, {.dtype = dtype});
        for (int step = 0; step < 4; ++step) {
          const Tensor own = gradient_of(group->rank(), step, dtype);
          bucket.run(hook, own);
          given += bucket.matrix;
          expected += average(own, group);
          require_close(bucket.vector, average(full({3}, own.to_vector<double>()[0], {.dtype = dtype}), group), 1e-6,
                        "what is sent whole");
          require(step > 0 || distance(given, expected) > 0.1, "a low rank leaves something out");
        }
        powersgd.gather_state();
        Tensor kept = zeros({12, 10}, {.dtype = dtype});
        if (group->rank() == 0)
          for (const auto& [name, t] : powersgd.state_dict())
            if (name == "error.matrix") kept = mean(t, {0});
        group->broadcast(kept, 0).wait();
        require_close(given + kept, expected, dtype == float64 ? 1e-12 : 1e-5, "what is given and what is kept");
      }
}

// The first step by the text of the paper, in float64 with plain matrices.
void one_step_of_the_paper(const Group& group) {
  PowerSGD powersgd({.matrix_approximation_rank = 2, .start_powersgd_iter = 0, .min_compression_rate = 1}, group);
  const CommHook hook = powersgd.hook();
  Bucket bucket(float64);
  bucket.run(hook, zeros({12, 10}, {.dtype = float64}));
  powersgd.gather_state();
  Tensor q = zeros({10, 2}, {.dtype = float64});
  if (group->rank() == 0)
    for (const auto& [name, t] : powersgd.state_dict())
      if (name == "q.matrix") q.copy_(t);
  group->broadcast(q, 0).wait();
  require_close(matmul(q.t(), q), eye(2, {.dtype = float64}), 1e-12, "q is orthonormal, also after a step of zeros");

  const Tensor own = gradient_of(group->rank(), 0, float64);
  bucket.run(hook, own);
  Tensor p = average(matmul(own, q), group);
  Tensor first = p.slice(1, 0, 1), second = p.slice(1, 1, 2);
  first = first / norm(first);
  second = second - first * sum(first * second);
  second = second / norm(second);
  p = cat({first, second}, 1);
  require_close(bucket.matrix, matmul(p, average(matmul(own.t(), p), group).t()), 1e-12, "P Q^T");
}

// A gradient of the rank that is sent is sent whole, and the next ones from the directions of the last.
void exact_where_it_can_be(const Group& group) {
  const Tensor common = matmul(wave({12, 2}, 1), wave({2, 10}, 2));
  for (const bool feedback : {true, false}) {
    PowerSGD powersgd({.matrix_approximation_rank = 2,
                       .start_powersgd_iter = 0,
                       .min_compression_rate = 1,
                       .use_error_feedback = feedback},
                      group);
    const CommHook hook = powersgd.hook();
    Bucket bucket(float64);
    for (int step = 0; step < 3; ++step) {
      bucket.run(hook, common * (group->rank() + 1));
      require_close(bucket.matrix, common * ((group->size() + 1) / 2.0), 1e-10, "a gradient of rank 2");
    }
    bucket.run(hook, zeros({12, 10}, {.dtype = float64}));
    require(norm(bucket.matrix).item<double>() < 1e-10, "no gradient");
    for (int step = 0; step < 2; ++step) {  // directions that are gone come back
      bucket.run(hook, common);
      require_close(bucket.matrix, common, 1e-10, "the gradient after none");
    }
    // A gradient of rank 1 leaves a column of P without a direction of its own.
    const Tensor thin = matmul(wave({12, 1}, 3), wave({1, 10}, 4));
    for (const Tensor& g : {thin, common, thin}) {
      bucket.run(hook, g);
      bucket.run(hook, g);
      if (feedback) require(distance(bucket.matrix, g) < 1e-8, "the rank may change");
    }
  }
}

// A step that is no number on one rank is none on any, and leaves nothing behind.
void not_a_number(const Group& group) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    PowerSGD powersgd({.start_powersgd_iter = 0, .min_compression_rate = 1}, group);
    PowerSGD other({.start_powersgd_iter = 0, .min_compression_rate = 1}, group);
    const CommHook hook = powersgd.hook(), reference = other.hook();
    Bucket bucket(float32), plain(float32);
    for (int step = 0; step < 4; ++step) {
      const Tensor own = gradient_of(group->rank(), step, float32);
      if (step == 2) {
        Tensor spoilt = own.clone();
        if (group->rank() == group->size() - 1) spoilt.narrow(0, 3, 1).narrow(1, 2, 1).fill_(bad);
        bucket.run(hook, spoilt);
        for (const double value : bucket.matrix.to_vector<double>())
          require(std::isnan(value), "a gradient that is no number");
      }
      bucket.run(hook, own);
      plain.run(reference, own);
      require(equal(bucket.matrix, plain.matrix), "the steps before and after are as if it had not been");
    }
  }
}

// Bytes of a step of the model of the examples, sent and without a hook, as the documentation has them.
void bytes_of_a_step(const Group& group) {
  const auto make = [] {
    return std::make_shared<nn::SequentialImpl>(nn::Linear(784, 512), nn::ReLU(), nn::Linear(512, 512), nn::ReLU(),
                                                nn::Linear(512, 10));
  };
  struct Row {
    std::int64_t rank;  // 0: without PowerSGD
    CommHook (*make)(Group);
    std::int64_t bytes;
  };
  const Row rows[] = {{0, parallel::allreduce_hook, 2'678'848},
                      {0, parallel::fp16_compress_hook, 1'339'424},
                      {0, parallel::bf16_compress_hook, 1'339'424},
                      {1, nullptr, 15'504},
                      {4, nullptr, 49'608}};
  for (const Row& row : rows) {
    const auto spy = std::make_shared<Spy>(group);
    std::optional<PowerSGD> powersgd;
    if (row.rank > 0)
      powersgd.emplace(PowerSGDOptions{.matrix_approximation_rank = row.rank, .start_powersgd_iter = 2}, spy);
    DistributedDataParallel ddp(make(), {.process_group = spy});
    ddp.register_comm_hook(powersgd ? powersgd->hook() : row.make(spy));
    for (int step = 0; step < 4; ++step) {
      spy->reduced_bytes = 0;
      mean(ddp(wave({2, 784}, step, float32))).backward();
      const std::int64_t expected = row.rank > 0 && step < 2 ? rows[0].bytes : row.bytes;
      require(spy->reduced_bytes == expected,
              fmt::format("{} bytes of step {}, not {}", spy->reduced_bytes, step, expected));
    }
  }
}

// Another bucket plan, and what the buckets do not decide: the bits are the same.
void whatever_the_buckets(const Group& group) {
  std::vector<Tensor> first;
  for (const double cap : {1.0, 1e-5})
    for (const bool find : {false, true}) {
      const auto net = make_mlp(float32);
      DistributedDataParallel ddp(
          net, {.process_group = group, .bucket_cap_mb = cap, .find_unused_parameters = find, .first_bucket_mb = cap});
      PowerSGD powersgd({.start_powersgd_iter = 1, .min_compression_rate = 1}, group);
      ddp.register_comm_hook(powersgd.hook());
      std::vector<Tensor> seen;
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        mean(pow(ddp(wave({4, 6}, group->rank() + 0.3 * step, float32)), 2)).backward();
        for (const Tensor& p : net->parameters()) seen.push_back(p.grad().clone());
      }
      if (first.empty()) first = seen;
      for (std::size_t i = 0; i < seen.size(); ++i) require(equal(seen[i], first[i]), "bits without regard to buckets");
    }
}

struct PowerSgdTraining {
  explicit PowerSgdTraining(const Group& g) : group(g) { ddp.register_comm_hook(powersgd.hook()); }
  void steps(int count) {
    for (; count > 0; --count, ++progress.step) {
      const double phase = 0.1 * static_cast<double>(progress.step);
      mean(pow(ddp(part(wave({12, 6}, phase), group)), 2)).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  Group group;
  std::shared_ptr<nn::SequentialImpl> net = make_mlp();
  DistributedDataParallel ddp{net, {.process_group = group}};
  optim::SGD optimizer{net->parameters(), {.lr = 0.1, .momentum = 0.9}};
  PowerSGD powersgd{{.start_powersgd_iter = 2, .min_compression_rate = 1}, group};
  Progress progress;
};

void powersgd_resumed(const Group& group) {
  const std::string path = file_of(group, "powersgd");
  for (const int at : {1, 5}) {  // before and after the first gradient is compressed
    PowerSgdTraining whole(group);
    whole.steps(at);
    whole.powersgd.gather_state();
    save_checkpoint(path, {whole.net, whole.optimizer, whole.progress, whole.powersgd}, group);
    whole.steps(5);
    group->barrier().wait();
    PowerSgdTraining again(group);
    load_checkpoint(path, {again.net, again.optimizer, again.progress, again.powersgd}, {}, group);
    again.steps(5);
    for (std::size_t i = 0; i < 4; ++i)
      require(equal(whole.net->parameters()[i].detach(), again.net->parameters()[i].detach()),
              "a resumed run has the weights of one that was not stopped");
    group->barrier().wait();
  }
  if (group->rank() == 0) std::filesystem::remove(path);
}

// Loaded on another number of ranks, what was kept back is shared out evenly.
void another_number_of_ranks(const Group& group) {
  PowerSGD powersgd({.start_powersgd_iter = 0, .min_compression_rate = 1}, group);
  const Tensor kept = wave({group->size() + 1, 12, 10}, 1, float32), q = wave({10, 1}, 2, float32);
  powersgd.load_state_dict({{"iteration", tensor(7)}, {"q.matrix", q}, {"error.matrix", kept}});
  powersgd.gather_state();
  if (group->rank() == 0) {
    const NamedTensors state = powersgd.state_dict();
    require(state.size() == 3 && state[0].second.item<std::int64_t>() == 7 && equal(state[1].second, q), "the state");
    for (int r = 0; r < group->size(); ++r)
      require_close(state[2].second[r], mean(kept, {0}), 1e-6, "the average of what the ranks had");
  }
  const CommHook hook = powersgd.hook();
  Bucket bucket(float32);
  bucket.run(hook, zeros({12, 10}));
  require(norm(bucket.matrix).item<double>() > 0.1, "what was kept back is given");
  // A state goes from rank 0, which alone has loaded it, to all.
  PowerSGD second({.start_powersgd_iter = 0, .min_compression_rate = 1}, group);
  const Tensor one_each = wave({group->size(), 12, 10}, 3, float32);
  if (group->rank() == 0)
    second.load_state_dict({{"iteration", tensor(9)}, {"q.matrix", q}, {"error.matrix", one_each}});
  parallel::broadcast_state(second, group);
  second.gather_state();
  if (group->rank() == 0) require(equal(second.state_dict()[2].second, one_each), "each rank has its own");
}

void errors_of_powersgd(const Group& group) {
  require_error({"[PowerSGD]", "matrix_approximation_rank is 0"},
                [&] { PowerSGD({.matrix_approximation_rank = 0}, group); });
  require_error({"start_powersgd_iter is -1"}, [&] { PowerSGD({.start_powersgd_iter = -1}, group); });
  for (const double rate : {0.0, std::numeric_limits<double>::infinity()})
    require_error({"min_compression_rate is "}, [&] { PowerSGD({.min_compression_rate = rate}, group); });
  PowerSGD powersgd({.start_powersgd_iter = 0, .min_compression_rate = 1}, group);
  const CommHook hook = powersgd.hook();
  require_error({"given out already", "one for each model"}, [&] { (void)powersgd.hook(); });
  require(powersgd.state_dict().size() == 1, "nothing but the count at first");
  Bucket bucket(float32);
  bucket.run(hook, gradient_of(group->rank(), 0, float32));
  const std::string missing = "call gather_state() on every rank";
  if (group->size() > 1) require_error({missing}, [&] { (void)powersgd.state_dict(); });
  if (group->size() > 1)
    require_error({"the ranks disagree", "(part of PowerSGD::gather_state, which every rank must call)"}, [&] {
      if (group->rank() == 0) powersgd.gather_state();
      group->barrier().wait();
    });
  powersgd.gather_state();
  if (group->rank() != 0) require_error({missing, "on rank 0"}, [&] { (void)powersgd.state_dict(); });
  if (group->rank() == 0) require(powersgd.state_dict().size() == 3, "count, q and error");
  bucket.run(hook, gradient_of(group->rank(), 1, float32));
  if (group->size() > 1) require_error({missing}, [&] { (void)powersgd.state_dict(); });

  const Tensor count = tensor(1);
  const std::pair<NamedTensors, std::string> bad[] = {
      {{}, "iteration is missing, or no count"},
      {{{"iteration", tensor(-1)}}, "iteration is missing, or no count"},
      {{{"iteration", count}, {"momentum", ones({1})}}, "momentum is unknown"},
      {{{"iteration", count}, {"q.w", ones({3})}}, "q.w has shape {3} and type float32, which is not"},
      {{{"iteration", count}, {"error.w", ones({1, 2, 3}).to(int64)}}, "error.w has shape {1, 2, 3} and type int64"},
      {{{"iteration", count}, {"q.w", ones({3, 2})}}, "q.w has rank 2, but matrix_approximation_rank is 1"}};
  for (const auto& [state, text] : bad)
    require_error({"nothing was changed", text}, [&, &s = state] { powersgd.load_state_dict(s); });
  powersgd.load_state_dict({{"iteration", count}, {"q.matrix", ones({9, 1})}});
  GradBucket& shown = bucket.bucket;
  require_error({"of another model, or of other options", "q of 'matrix' has shape {9, 1}", "needs {10, 1}"},
                [&] { parallel::run_hook(hook, shown, *group).wait(); });
  const NamedTensors fits = {{"iteration", count}, {"q.matrix", ones({10, 1})}};
  NamedTensors foreign = fits;
  foreign.emplace_back("q.stranger", ones({9, 1}));
  powersgd.load_state_dict(foreign);
  for (int i = 0; i < 2; ++i)
    require_error({"of another model, or of other options", "it has 'stranger'"},
                  [&] { parallel::run_hook(hook, shown, *group).wait(); });
  powersgd.load_state_dict(fits);
  parallel::run_hook(hook, shown, *group).wait();
}

}  // namespace

std::vector<DdpCase> powersgd_cases() {
  return {{"error feedback", error_feedback},
          {"one step of the paper", one_step_of_the_paper},
          {"exact where it can be", exact_where_it_can_be},
          {"not a number", not_a_number},
          {"bytes of a step", bytes_of_a_step},
          {"whatever the buckets", whatever_the_buckets},
          {"PowerSGD resumed with the same bits", powersgd_resumed},
          {"another number of ranks", another_number_of_ranks},
          {"errors of PowerSGD", errors_of_powersgd}};
}

}  // namespace tandem::test
