#include <tandem/parallel/reproducible.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <exception>

#include <tandem/autograd/functions.h>
#include <tandem/autograd/node.h>
#include <tandem/parallel/consistency.h>
#include <tandem/parallel/on_device.h>
#include <tandem/parallel/placement.h>
#include <tandem/parallel/replicas.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/threads.h>

namespace tandem::parallel {
namespace {

// What a rank tells the others about a batch and its parts. Dtypes of a sum that it does not have are -1.
struct Told {
  std::int64_t rows = 0, batch = 0, seed = 0, dtype = -1;
  double sum = 0, normalizer = 0;
};
using Words = std::array<std::int64_t, 6>;

std::uint64_t mix(std::uint64_t h, const Tensor& t) {
  const Tensor dense = t.detach().to(Device()).contiguous();
  const auto* bytes = static_cast<const char*>(dense.raw().data);
  auto add = [&](std::uint64_t word) {
    h = (h ^ word) * 0x9E3779B97F4A7C15;
    h ^= h >> 32;
  };
  for (const std::int64_t size : t.shape()) add(static_cast<std::uint64_t>(size));
  for (std::size_t left = static_cast<std::size_t>(t.numel()) * size_of(t.dtype()), n = 0; left > 0; left -= n) {
    std::uint64_t word = 0;
    n = std::min<std::size_t>(left, sizeof word);
    std::memcpy(&word, bytes, n);
    bytes += n;
    add(word);
  }
  return h;
}

// The sum in the tree of combine, for a power of two of values.
template <class T>
T sum_tree(std::span<const double> values) {
  if (values.size() == 1) return static_cast<T>(values.front());
  const std::size_t half = values.size() / 2;
  return sum_tree<T>(values.first(half)) + sum_tree<T>(values.subspan(half));
}
double sum_tree(std::span<const double> values, DType dtype) {
  return dtype == float32 ? sum_tree<float>(values) : sum_tree<double>(values);
}

// What fails on this rank alone takes the place of the next collective, so that the others do not wait for it.
template <class Body>
void attempt(ProcessGroup* group, const Body& body) {
  try {
    body();
  } catch (const std::exception& e) {
    if (group != nullptr) try {
        group->fail(e.what()).wait();
      } catch (const std::exception&) {  // the first error is what counts
      }
    throw;
  }
}

// A part in memory of its own: what kernels do with the ends of a row may depend on where it begins.
Tensor part_at(const Tensor& whole, std::int64_t first, std::int64_t rows, Device device) {
  const Tensor part = on_device(whole.narrow(0, first, rows), device);
  return share_memory(whole.device(), device) ? part.clone() : part;
}

// Compares what the ranks have told; the result is the same on each.
void check_told(std::span<const Told> all, int rank) {
  const Told& first = all.front();
  for (std::size_t r = 1; r < all.size(); ++r) {
    const Told& other = all[r];
    auto differ = [&](const std::string& what) {
      throw CommError(static_cast<int>(r), fmt::format("rank {} of {}: {}", rank, all.size(), what));
    };
    if (other.rows != first.rows)
      differ(
          fmt::format("with reproducible_shards every rank gives the whole batch, but rank 0 gave {} rows and rank "
                      "{} gave {}",
                      first.rows, r, other.rows));
    if (other.batch != first.batch)
      differ(
          fmt::format("with reproducible_shards every rank gives the whole batch, but rank {} gave another one than "
                      "rank 0",
                      r));
    if (other.seed != first.seed)
      differ(
          fmt::format("with reproducible_shards every rank has the same seed, but rank 0 has {} and rank {} has {}; "
                      "call manual_seed with one number on all",
                      static_cast<std::uint64_t>(first.seed), r, static_cast<std::uint64_t>(other.seed)));
  }
}

std::vector<Told> exchange(const Told& mine, ProcessGroup& group) {
  const auto words = std::bit_cast<Words>(mine);
  constexpr auto kCount = static_cast<std::int64_t>(words.size());
  Tensor all = empty({group.size(), kCount}, {.dtype = int64});
  group.all_gather(all, tensor(std::vector<std::int64_t>(words.begin(), words.end()))).wait();
  std::vector<Told> told;
  for (int r = 0; r < group.size(); ++r) {
    Words other;
    std::copy_n(all.const_data<std::int64_t>() + r * kCount, kCount, other.begin());
    told.push_back(std::bit_cast<Told>(other));
  }
  check_told(told, group.rank());
  return told;
}

// The sums over the parts that are computed here, undefined for those without rows. `told` gets what they come to.
std::vector<Tensor> compute(const Shards& shards, const Tensor& x, const Tensor& y, PartOfLoss part_of, Told& told) {
  Replicas& replicas = *shards.replicas;
  const std::size_t here = replicas.devices().size();
  const std::size_t first = shards.group ? here * static_cast<std::size_t>(shards.group->rank()) : 0;
  const std::vector<std::int64_t> sizes = balanced_sizes(x.size(0), static_cast<std::size_t>(shards.count));
  std::vector<std::int64_t> starts(sizes.size());
  for (std::size_t i = 1; i < sizes.size(); ++i) starts[i] = starts[i - 1] + sizes[i - 1];
  std::vector<Tensor> sums(here);
  std::vector<double> values(here, 0.0), normalizers(here, 0.0);
  replicas.refresh();
  replicas.run(here, [&](std::size_t i) {
    const std::size_t part = first + i;
    if (part >= sizes.size()) return;
    const RandomStream stream(kFirstPartStream + static_cast<int>(part));
    const SingleThreadScope one_thread;
    const Device device = replicas.devices()[i];
    const Tensor target = part_at(y, starts[part], sizes[part], device);
    LossOfPart own = part_of(replicas.module()(part_at(x, starts[part], sizes[part], device)), target);
    check(own.sum.defined() && own.sum.numel() == 1, shards.name,
          "the loss function gave {} for a part; a mean or a sum is one number",
          own.sum.defined() ? fmt::format("{}", own.sum.shape()) : "nothing");
    values[i] = own.sum.item<double>();
    normalizers[i] = own.normalizer;
    sums[i] = own.sum.dim() == 0 ? std::move(own.sum) : own.sum.view({});
  });
  told.rows = x.size(0);
  if (sums.front().defined()) told.dtype = static_cast<std::int64_t>(sums.front().dtype());
  told.sum = sum_tree(values, static_cast<DType>(told.dtype));
  told.normalizer = sum_tree<double>(normalizers);
  return sums;
}

// What shows that ranks have the same batch and draw the same numbers.
void sign(Told& told, const Tensor& x, const Tensor& y) {
  told.batch = static_cast<std::int64_t>(mix(x.size(0) > 0 ? mix(0, x[0]) : 0, y));
  told.seed = static_cast<std::int64_t>(random_state().seed);
}

Told of_all(std::span<const Told> ranks) {
  Told all = ranks.front();  // rank 0 always has a part, and so the type of a sum
  std::vector<double> sums, normalizers;
  for (const Told& t : ranks) {
    sums.push_back(t.sum);
    normalizers.push_back(t.normalizer);
  }
  all.sum = sum_tree(sums, static_cast<DType>(all.dtype));
  all.normalizer = sum_tree<double>(normalizers);
  return all;
}

// The sum over all parts, whose gradient is that of each part here.
Tensor join(const Shards& shards, std::span<const Tensor> sums, const Told& told) {
  const auto dtype = static_cast<DType>(told.dtype);
  std::vector<Tensor> inputs;
  for (const Tensor& sum : sums)
    if (sum.defined()) inputs.push_back(on_device(sum, shards.output_device));
  const std::size_t parts = inputs.size();
  // A rank whose parts reach nothing takes part in the backward too.
  Tensor anchor;
  if (shards.group) inputs.push_back(anchor = full({}, 0.0, {.dtype = dtype}).requires_grad_());
  Tensor total = full({}, told.sum, {.dtype = dtype, .device = shards.output_device});
  if (autograd::needs_grad(std::span<const Tensor>(inputs)))
    autograd::record("reproducible_loss", std::span<const Tensor>(inputs), total,
                     [anchor, parts](autograd::Gradients& g) {
                       for (std::size_t i = 0; i < parts; ++i)
                         if (g.wanted(i)) g.set(i, g[0]);
                     });
  return total;
}

}  // namespace

void check_shards(const char* name, int shards, int members, const char* what) {
  constexpr int kMost = kMaxStreams - kFirstPartStream;
  check(shards > 0 && shards <= kMost && std::has_single_bit(static_cast<unsigned>(shards)), name,
        "reproducible_shards is {}; give a power of two, at most {}, or 0 for none", shards, kMost);
  check(shards % members == 0, name, "{} {} cannot share reproducible_shards = {} parts evenly; use 1, 2, 4, ... {}",
        members, what, shards, what);
}

void check_no_recorded_forward(const char* name) {
  check(!grad_enabled(), name,
        "with reproducible_shards a model is trained through loss(criterion, x, y), which knows the parts of a batch; "
        "a forward of its own needs NoGradGuard");
}

LossOfPart part_of_loss(const nn::Loss& criterion, const Tensor& output, const Tensor& target) {
  LossParts parts = criterion.parts(output, target);
  return {std::move(parts.sum), parts.normalizer.item<double>()};
}

LossOfPart part_of_loss(FunctionRef<Tensor(const Tensor&, const Tensor&)> function, bool mean, const Tensor& output,
                        const Tensor& target) {
  const auto rows = static_cast<double>(target.size(0));
  if (rows == 0) return {sum(output), 0};  // the mean of nothing is no number; no row adds nothing
  const Tensor value = function(output, target);
  return {mean ? value * rows : value, rows};
}

Tensor reproducible_loss(const Shards& shards, Reduction reduction, const Tensor& x, const Tensor& y,
                         PartOfLoss part_of, FunctionRef<void()> check_first) {
  ProcessGroup* const group = shards.group.get();
  attempt(group, [&] {
    check_first();
    check(reduction != Reduction::none, shards.name,
          "with reproducible_shards a loss is one number: use Reduction::mean or sum, or for single rows "
          "criterion(model(x), y) under NoGradGuard");
    check(x.dim() > 0 && y.dim() > 0 && y.size(0) == x.size(0), shards.name,
          "the input {} and the target {} have different numbers of rows", x.shape(), y.shape());
  });
  // The buffers of part 0 are those of all.
  if (group != nullptr) broadcast_tensors(shards.replicas->module().buffers(), 0, *group);
  Told told;
  std::vector<Tensor> sums;
  attempt(group, [&] {
    sums = compute(shards, x, y, part_of, told);
    if (group != nullptr) sign(told, x, y);
  });
  if (group != nullptr) told = of_all(exchange(told, *group));
  const Tensor total = join(shards, sums, told);
  return shards.replicas->listen(reduction == Reduction::mean ? mean_of_parts(total, told.normalizer) : total);
}

}  // namespace tandem::parallel
