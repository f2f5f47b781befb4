#include <tandem/parallel/powersgd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>

#include <fmt/ranges.h>

#include <tandem/autograd/functions.h>
#include <tandem/autograd/grad_mode.h>
#include <tandem/parallel/low_rank.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/random.h>
#include <tandem/tensor/trace.h>

namespace tandem::parallel {
namespace {

constexpr const char* kPowerSGD = "PowerSGD";

// What is kept of a gradient from step to step, by the name of its parameter: buckets may be made anew.
struct Matrix {
  Tensor q;      // {cols, rank}, orthonormal, the same on all ranks; undefined before the first use
  Tensor error;  // {rows, cols}, of this rank
};

// A gradient that is sent as a product, and where its factors lie in what is sent.
struct Part {
  std::size_t index = 0;  // in the bucket
  Shape shape = {};       // {rows, cols}
  Matrix* matrix = nullptr;
  Tensor p = {}, q = {};
};

// What is sent for a bucket: first all P, and the gradients that are sent whole; then all Q.
struct Plan {
  std::vector<std::string> names;
  std::vector<Part> parts;
  std::vector<std::pair<std::size_t, Tensor>> whole;
  Tensor first, second;
};

// What a bucket's time goes into, one after the other on its row of the timeline.
class Stages {
 public:
  explicit Stages(int bucket) : bucket_(bucket), from_(trace::is_on() ? trace::now() : 0) {}
  void end(const char* stage) {
    if (from_ != 0) trace::span(stage, trace::bucket_track(bucket_), {}, from_);
    from_ = trace::is_on() ? trace::now() : 0;
  }

 private:
  int bucket_;
  std::int64_t from_;
};

std::uint64_t hash_of_name(const std::string& text) {
  std::uint64_t h = 0xCBF29CE484222325u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return h;
}

}  // namespace

struct PowerSGD::State {
  PowerSGDOptions options;
  std::shared_ptr<ProcessGroup> group;
  bool in_use = false;
  std::int64_t iteration = 0;
  std::map<std::string, Matrix> matrices;
  std::vector<std::shared_ptr<const Plan>> plans;  // by bucket
  std::optional<NamedTensors> gathered;            // on rank 0, for this iteration

  // What a gradient is sent as; 0: whole.
  std::int64_t rank_of(const Tensor& gradient) const {
    if (gradient.dim() < 2 || gradient.numel() == 0 || size_of(gradient.dtype()) < 4) return 0;
    const std::int64_t rows = gradient.size(0), cols = gradient.numel() / rows;
    const std::int64_t rank = std::min({options.matrix_approximation_rank, rows, cols});
    const double sent = static_cast<double>((rows + cols) * rank);
    return sent * options.min_compression_rate < static_cast<double>(rows * cols) ? rank : 0;
  }

  // The same on all ranks, and another for each parameter and step.
  Tensor random_q(const std::string& name, std::int64_t step, const Shape& shape, DType dtype) const {
    constexpr std::uint64_t kOwnStreams = std::uint64_t{1} << 63;  // none of manual_seed's
    const RandomScope scope(PhiloxKey{.seed = options.seed,
                                      .stream = hash_of_name(name) | kOwnStreams,
                                      .block = static_cast<std::uint64_t>(step) << 32});
    Tensor q = rand(shape, {.dtype = dtype});  // uniform: exact, where normal numbers need a logarithm
    return q.sub_(0.5);
  }

  const std::shared_ptr<const Plan>& plan_of(const GradBucket& bucket) {
    const auto index = static_cast<std::size_t>(bucket.index());
    if (plans.size() <= index || bucket.is_last()) plans.resize(index + 1);
    if (!plans[index] || plans[index]->names != bucket.names()) {
      const std::shared_ptr<const Plan> plan = make_plan(bucket);
      if (bucket.is_last()) verify_names(*plan);
      plans[index] = plan;
    }
    return plans[index];
  }
  // Entries of another model would go on into every checkpoint.
  void verify_names(const Plan& last) const {
    std::vector<const Matrix*> used;
    const auto add = [&](const Plan& plan) {
      for (const Part& part : plan.parts) used.push_back(part.matrix);
    };
    for (const auto& plan : plans)
      if (plan) add(*plan);
    add(last);
    for (const auto& [name, matrix] : matrices)
      check(std::ranges::find(used, &matrix) != used.end(), kPowerSGD,
            "the state that was loaded is of another model, or of other options: it has '{}', which is no gradient "
            "that is sent as a product here",
            name);
  }
  std::shared_ptr<const Plan> make_plan(const GradBucket& bucket) {
    auto plan = std::make_shared<Plan>();
    plan->names = bucket.names();
    std::int64_t p_count = 0, q_count = 0, whole_count = 0;
    std::vector<std::int64_t> ranks;
    for (const Tensor& g : bucket.gradients()) {
      ranks.push_back(rank_of(g));
      if (ranks.back() == 0) {
        whole_count += g.numel();
      } else {
        p_count += g.size(0) * ranks.back();
        q_count += g.numel() / g.size(0) * ranks.back();
      }
    }
    const TensorOptions like = {.dtype = bucket.buffer().dtype(), .device = bucket.buffer().device()};
    plan->first = empty({p_count + whole_count}, like);
    plan->second = empty({q_count}, like);
    std::int64_t p_at = 0, q_at = 0, whole_at = p_count;
    auto next = [](const Tensor& from, std::int64_t& at, const Shape& shape, std::int64_t count) {
      Tensor view = from.narrow(0, at, count).view(shape);
      at += count;
      return view;
    };
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const Tensor& g = bucket.gradients()[i];
      if (ranks[i] == 0) {
        plan->whole.emplace_back(i, next(plan->first, whole_at, g.shape(), g.numel()));
        continue;
      }
      const std::int64_t rows = g.size(0), cols = g.numel() / rows, rank = ranks[i];
      Part part{.index = i, .shape = {rows, cols}, .matrix = &matrices[bucket.names()[i]]};
      part.p = next(plan->first, p_at, {rows, rank}, rows * rank);
      part.q = next(plan->second, q_at, {cols, rank}, cols * rank);
      check_matrix(bucket.names()[i], *part.matrix, part, like);
      plan->parts.push_back(std::move(part));
    }
    return plan;
  }
  // A state that was loaded belongs to this model, and is brought to where the gradients are.
  void check_matrix(const std::string& name, Matrix& matrix, const Part& part, const TensorOptions& like) const {
    auto fit = [&](Tensor& t, const char* what, const Shape& shape) {
      if (!t.defined()) return;
      check(t.shape() == shape, kPowerSGD,
            "the state that was loaded is of another model, or of other options: {} of '{}' has shape {}, but this "
            "gradient needs {}",
            what, name, t.shape(), shape);
      t = t.to(*like.dtype).to(like.device);
    };
    fit(matrix.q, "q", part.q.shape());
    fit(matrix.error, "error", part.shape);
  }

  static Tensor matrix_in(const GradBucket& bucket, const Part& part) {
    return bucket.gradients()[part.index].view(part.shape);
  }

  // Fills what is sent first.
  void begin(const Plan& plan, const GradBucket& bucket) {
    for (const Part& part : plan.parts) {
      Tensor m = matrix_in(bucket, part), p = part.p;
      Matrix& kept = *part.matrix;
      if (options.use_error_feedback) {
        if (!kept.error.defined()) kept.error = zeros_like(m);
        m.add_(kept.error);
      }
      if (!kept.q.defined() || !options.warm_start) {
        kept.q = random_q(plan.names[part.index], iteration, part.q.shape(), m.dtype());
        orthonormalise(kept.q);
      }
      p.copy_(matmul(m, kept.q));
    }
    for (const auto& [index, place] : plan.whole) Tensor(place).copy_(bucket.gradients()[index]);
  }
  // From the averaged P to what is sent next.
  static void project(const Plan& plan, const GradBucket& bucket) {
    for (const Part& part : plan.parts) {
      Tensor p = part.p, q = part.q;
      if (!orthonormalise(p)) p.fill_(std::numeric_limits<double>::quiet_NaN());
      q.copy_(matmul(matrix_in(bucket, part).t(), p));
    }
  }
  // From the averaged Q to the gradients, and to what the next step begins with.
  void finish(const Plan& plan, const GradBucket& bucket, std::int64_t step) {
    gathered.reset();
    for (const Part& part : plan.parts) {
      Tensor m = matrix_in(bucket, part), next = part.q.clone();
      Matrix& kept = *part.matrix;
      const Tensor spare = random_q(plan.names[part.index], step + 1, next.shape(), next.dtype());
      const bool finite = orthonormalise(next, &spare);
      replace_by_product(m, finite && options.use_error_feedback ? &kept.error : nullptr, part.p,
                         part.q.t().contiguous());
      if (finite) kept.q = next;
    }
    for (const auto& [index, place] : plan.whole) Tensor(bucket.gradients()[index]).copy_(place);
  }

  static Work run(const std::shared_ptr<State>& self, GradBucket& bucket) {
    State& s = *self;
    check(
        bucket.buffer().device().is_cpu(), kPowerSGD,
        "the model is on {}, but its products are made on the CPU; use fp16_compress_hook or bf16_compress_hook there",
        bucket.buffer().device());
    const std::int64_t step = s.iteration;
    const std::shared_ptr<const Plan> plan = step < s.options.start_powersgd_iter ? nullptr : s.plan_of(bucket);
    const bool compress = plan && !plan->parts.empty();
    const auto stages = compress ? std::make_shared<Stages>(bucket.index()) : nullptr;
    if (compress) {
      s.begin(*plan, bucket);
      stages->end("compress");
    }
    Tensor first = compress ? plan->first : bucket.buffer();
    Work work = s.group->all_reduce(first, ReduceOp::avg);
    // Counted where all ranks have come to, or none.
    if (bucket.is_last()) work = then(std::move(work), [self, step] { self->iteration = step + 1; });
    if (!compress) return work;
    work = then(std::move(work), s.group, [self, plan, stages, &bucket] {
      stages->end("send P");
      project(*plan, bucket);
      stages->end("project");
      Tensor second = plan->second;
      return self->group->all_reduce(second, ReduceOp::avg);
    });
    return then(std::move(work), [self, plan, stages, step, &bucket] {
      stages->end("send Q");
      self->finish(*plan, bucket, step);
      stages->end("decompress");
    });
  }
};

PowerSGD::PowerSGD(const PowerSGDOptions& options, std::shared_ptr<ProcessGroup> group)
    : state_(std::make_shared<State>()) {
  check(options.matrix_approximation_rank >= 1, kPowerSGD, "matrix_approximation_rank is {}; it must be at least 1",
        options.matrix_approximation_rank);
  check(options.start_powersgd_iter >= 0, kPowerSGD, "start_powersgd_iter is {}; it must not be negative",
        options.start_powersgd_iter);
  check(std::isfinite(options.min_compression_rate) && options.min_compression_rate > 0, kPowerSGD,
        "min_compression_rate is {}; it must be above 0", options.min_compression_rate);
  state_->options = options;
  state_->group = or_default(std::move(group));
}

CommHook PowerSGD::hook() {
  check(!std::exchange(state_->in_use, true), kPowerSGD, "its hook was given out already; make one for each model");
  const PowerSGDOptions& o = state_->options;
  return {fmt::format("powersgd of rank {} from iteration {}, rate {}, error feedback {}, warm start {}, seed {}",
                      o.matrix_approximation_rank, o.start_powersgd_iter, o.min_compression_rate, o.use_error_feedback,
                      o.warm_start, o.seed),
          [self = state_](GradBucket& bucket) { return State::run(self, bucket); }};
}

void PowerSGD::gather_state() {
  const Purpose purpose("PowerSGD::gather_state");
  const NoGradGuard no_grad;
  State& s = *state_;
  NamedTensors all;
  for (const auto& [name, matrix] : s.matrices) {
    if (!matrix.error.defined()) continue;
    Tensor rows;
    if (s.group->rank() == 0)
      rows = empty({s.group->size(), matrix.error.size(0), matrix.error.size(1)}, {.dtype = matrix.error.dtype()});
    s.group->gather(rows, matrix.error, 0).wait();
    all.emplace_back("error." + name, rows);
  }
  s.gathered = std::move(all);
}

NamedTensors PowerSGD::state_dict() const {
  const State& s = *state_;
  NamedTensors state = {{"iteration", tensor(s.iteration)}};
  for (const auto& [name, matrix] : s.matrices)
    if (matrix.q.defined()) state.emplace_back("q." + name, matrix.q);
  const bool alone = s.group->size() == 1;
  const bool has_errors =
      std::ranges::any_of(s.matrices, [](const auto& entry) { return entry.second.error.defined(); });
  if (!has_errors) return state;
  check(alone || (s.group->rank() == 0 && s.gathered), kPowerSGD,
        "rank {} of {}: each rank has its own part of the state; call gather_state() on every rank, and then save on "
        "rank 0, before the next backward",
        s.group->rank(), s.group->size());
  if (alone) {
    for (const auto& [name, matrix] : s.matrices)
      if (matrix.error.defined()) state.emplace_back("error." + name, matrix.error.unsqueeze(0));
  } else {
    state.insert(state.end(), s.gathered->begin(), s.gathered->end());
  }
  return state;
}

std::vector<std::string> PowerSGD::state_problems(const NamedTensors& state) const {
  std::vector<std::string> problems;
  bool counted = false;
  for (const auto& [name, t] : state) {
    if (name == "iteration") {
      counted = is_integral(t.dtype()) && t.numel() == 1 && t.item<std::int64_t>() >= 0;
      continue;
    }
    const bool is_q = name.starts_with("q."), is_error = name.starts_with("error.");
    if (!is_q && !is_error)
      problems.push_back(fmt::format("{} is unknown", name));
    else if (t.dim() != (is_q ? 2 : 3) || t.numel() == 0 || (t.dtype() != float32 && t.dtype() != float64))
      problems.push_back(
          fmt::format("{} has shape {} and type {}, which is not what PowerSGD saves", name, t.shape(), t.dtype()));
    else if (is_q && t.size(1) > state_->options.matrix_approximation_rank)
      problems.push_back(fmt::format("{} has rank {}, but matrix_approximation_rank is {}", name, t.size(1),
                                     state_->options.matrix_approximation_rank));
  }
  if (!counted) problems.emplace_back("iteration is missing, or no count");
  return problems;
}

void PowerSGD::load_state_dict(const NamedTensors& state) {
  const NoGradGuard no_grad;
  State& s = *state_;
  const auto problems = state_problems(state);
  check(problems.empty(), kPowerSGD,
        "the state does not fit, and nothing was changed; load what a PowerSGD has saved:\n  {}",
        fmt::format("{}", fmt::join(problems, "\n  ")));
  std::map<std::string, Matrix> loaded;
  NamedTensors errors;
  std::int64_t iteration = 0;
  for (const auto& [name, t] : state) {
    if (name == "iteration") {
      iteration = t.item<std::int64_t>();
    } else if (name.starts_with("q.")) {
      loaded[name.substr(2)].q = t.clone();
    } else if (s.options.use_error_feedback) {
      const std::int64_t ranks = s.group->size();
      const Tensor all = t.size(0) == ranks ? t.clone() : mean(t, {0}, true).expand({ranks, -1, -1}).contiguous();
      loaded[name.substr(6)].error = all[s.group->rank()].clone();
      errors.emplace_back(name, all);
    }
  }
  s.iteration = iteration;
  s.matrices = std::move(loaded);
  s.plans.clear();
  s.gathered.reset();
  if (s.group->rank() == 0) s.gathered = std::move(errors);
}

}  // namespace tandem::parallel
