#include <tandem/parallel/reproducible.h>

#include <algorithm>
#include <array>
#include <bit>
#include <exception>
#include <span>
#include <vector>

#include <tandem/autograd/functions.h>
#include <tandem/autograd/node.h>
#include <tandem/parallel/consistency.h>
#include <tandem/parallel/contents.h>
#include <tandem/parallel/on_device.h>
#include <tandem/parallel/own_part.h>
#include <tandem/parallel/placement.h>
#include <tandem/parallel/replicas.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/threads.h>

namespace tandem::parallel {
namespace {

constexpr std::uint64_t kPartKeys = std::uint64_t{3} << 61;  // as streams that nothing else has

// What a rank tells the others about a loss before it computes its parts.
struct Opening {
  std::int64_t rows = 0, batch = 0, recorded = 0, stale = 0;
  std::uint64_t seed = 0, number = 0;  // of the losses so far
  std::uint64_t criterion = 0;         // a hash
};
// And about its parts. The dtype of a sum that it does not have is -1.
struct Told {
  std::int64_t dtype = -1;
  double sum = 0, normalizer = 0;
};

// A number that differs between batches, almost surely: of the targets and the first row.
std::int64_t digest_of(const Tensor& x, const Tensor& y) {
  std::vector<std::uint64_t> words;
  auto add = [&](const Tensor& t) {
    for (const std::int64_t size : t.shape()) words.push_back(static_cast<std::uint64_t>(size));
    words.push_back(hash(bytes_of(readable(t))));
  };
  if (x.size(0) > 0) add(x[0]);
  add(y);
  return static_cast<std::int64_t>(hash(std::as_bytes(std::span(words))));
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

// What fails on this rank alone is told to the others, where there are others.
template <class Body>
void attempt(ProcessGroup* group, const Body& body) {
  if (group == nullptr) return body();
  do_own_part(*group, body);
}

void check_one_number(const char* name, const Tensor& value) {
  check(value.defined() && value.numel() == 1, name,
        "the loss function gave {}; a mean or a sum is one number (for one a row a DataParallel has Reduction::none)",
        value.defined() ? fmt::format("a tensor of shape {}", value.shape()) : "nothing");
}

// A part in memory of its own: what kernels do with the ends of a row may depend on where it begins.
Tensor part_at(const Tensor& whole, std::int64_t first, std::int64_t rows, Device device) {
  const Tensor part = on_device(whole.narrow(0, first, rows), device);
  return share_memory(whole.device(), device) ? part.clone() : part;
}

// Compares what the ranks have told; the result is the same on each.
void check_alike(std::span<const Opening> all, int rank) {
  const Opening& first = all.front();
  for (std::size_t r = 1; r < all.size(); ++r) {
    const Opening& other = all[r];
    auto differ = [&](const std::string& what) {
      throw CommError(static_cast<int>(r),
                      fmt::format("rank {} of {}: with reproducible_shards every rank {}", rank, all.size(), what));
    };
    if (other.rows != first.rows)
      differ(
          fmt::format("gives the whole batch, but rank 0 gave {} rows and rank {} gave {}", first.rows, r, other.rows));
    if (other.batch != first.batch)
      differ(fmt::format("gives the whole batch, but rank {} gave another one than rank 0", r));
    if (other.seed != first.seed)
      differ(
          fmt::format("has the same seed, but rank 0 has {} and rank {} has {}; call manual_seed with one number on "
                      "all",
                      first.seed, r, other.seed));
    if (other.recorded != first.recorded)
      differ(fmt::format("computes the same loss, but rank {} is under NoGradGuard", first.recorded != 0 ? r : 0));
  }
}

// What each rank has told.
template <class T>
std::vector<T> exchange(const T& mine, ProcessGroup& group) {
  using Words = std::array<std::int64_t, sizeof(T) / sizeof(std::int64_t)>;
  const auto words = std::bit_cast<Words>(mine);
  constexpr auto kCount = static_cast<std::int64_t>(words.size());
  Tensor all = empty({group.size(), kCount}, {.dtype = int64});
  group.all_gather(all, tensor(std::vector<std::int64_t>(words.begin(), words.end()))).wait();
  std::vector<T> told;
  for (int r = 0; r < group.size(); ++r) {
    Words other;
    std::copy_n(all.const_data<std::int64_t>() + r * kCount, kCount, other.begin());
    told.push_back(std::bit_cast<T>(other));
  }
  return told;
}

// Moves the count of losses on. Rank 0's may also be less than this rank's.
PhiloxKey count(std::uint64_t losses) {
  const RandomStream counter(kFirstCountStream + RandomStream::current() % kFirstCountStream);
  return draw(losses);
}

Opening open_loss(const Shards& shards, const std::string& criterion, const Tensor& x, const Tensor& y) {
  const PhiloxKey key = count(1);
  Opening mine{.rows = x.size(0),
               .recorded = grad_enabled(),
               .stale = !shards.replicas->current(),
               .seed = key.seed,
               .number = key.block,
               .criterion = hash(std::as_bytes(std::span(criterion)))};
  if (shards.group) mine.batch = digest_of(x, y);
  return mine;
}

// The ranks agree on what they are about to do, and go on from rank 0's count.
Opening agree(const Opening& mine, const std::string& criterion, ProcessGroup& group) {
  const Purpose purpose(kPurposeOfLoss);
  const std::vector<Opening> all = exchange(mine, group);
  check_alike(all, group.rank());
  if (std::ranges::any_of(all, [&](const Opening& other) { return other.criterion != all.front().criterion; }))
    verify_alike({{"loss", criterion}}, group, kSameLoss);
  Opening agreed = all.front();
  for (const Opening& other : all) agreed.stale = agreed.stale | other.stale;
  if (agreed.number != mine.number) (void)count(agreed.number - mine.number);
  return agreed;
}

// The sums over the parts that are computed here, undefined for those without rows. `told` gets what they come to.
std::vector<Tensor> compute(const Shards& shards, const Opening& opening, const Tensor& x, const Tensor& y,
                            PartOfLoss part_of, Told& told) {
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
    const RandomStream of_backward(kFirstPartStream + static_cast<int>(part));
    const RandomScope of_forward({opening.seed, kPartKeys + part, opening.number << 32});
    const SingleThreadScope one_thread;
    const Device device = replicas.devices()[i];
    LossParts own;
    try {
      const Tensor target = part_at(y, starts[part], sizes[part], device);
      own = part_of(replicas.module()(part_at(x, starts[part], sizes[part], device)), target);
      check_one_number(shards.name, own.sum);
      check(own.sum.dtype() == float32 || own.sum.dtype() == float64, shards.name,
            "the loss function gave an {}; a loss is float32 or float64", own.sum.dtype());
    } catch (const std::exception& e) {
      const std::string rank =
          shards.group ? fmt::format("rank {} of {}, ", shards.group->rank(), shards.group->size()) : "";
      throw Error(fmt::format("{}part {} of {} with rows {} to {}: {}", rank, part, shards.count, starts[part],
                              starts[part] + sizes[part] - 1, e.what()));
    }
    values[i] = own.sum.item<double>();
    normalizers[i] = own.normalizer.item<double>();
    sums[i] = own.sum.dim() == 0 ? std::move(own.sum) : own.sum.view({});
  });
  if (sums.front().defined()) told.dtype = static_cast<std::int64_t>(sums.front().dtype());
  told.sum = sum_tree(values, static_cast<DType>(told.dtype));
  told.normalizer = sum_tree<double>(normalizers);
  return sums;
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

LossParts part_of_loss(const char* name, FunctionRef<Tensor(const Tensor&, const Tensor&)> function,
                       Reduction reduction, const Tensor& output, const Tensor& target) {
  const auto rows = static_cast<double>(target.size(0));
  const Tensor normalizer = full({}, rows, {.dtype = float64});
  if (rows == 0) return {sum(output), normalizer};  // the mean of nothing is no number; no row adds nothing
  const Tensor value = function(output, target);
  check_one_number(name, value);
  return {reduction == Reduction::mean ? value * rows : value, normalizer};
}

Tensor reproducible_loss(const Shards& shards, const std::string& criterion, Reduction reduction, const Tensor& x,
                         const Tensor& y, PartOfLoss part_of, FunctionRef<void()> check_first,
                         FunctionRef<void(bool)> begin) {
  ProcessGroup* const group = shards.group.get();
  Opening opening;
  attempt(group, [&] {
    check_first();
    check(reduction != Reduction::none, shards.name,
          "with reproducible_shards a loss is one number: use Reduction::mean or sum, or for single rows "
          "criterion(model(x), y) under NoGradGuard");
    check(x.dim() > 0 && y.dim() > 0 && y.size(0) == x.size(0), shards.name,
          "the input {} and the target {} have different numbers of rows", x.shape(), y.shape());
    check(group == nullptr || !grad_enabled() || !(x.requires_grad() || y.requires_grad()), shards.name,
          "with reproducible_shards the input and the target must not require grad: each rank has the gradient of its "
          "own parts' rows alone; make what computes them a part of the model, or detach them");
    opening = open_loss(shards, criterion, x, y);
  });
  if (group != nullptr) opening = agree(opening, criterion, *group);
  begin(opening.stale != 0);
  // The buffers of part 0 are those of all.
  if (group != nullptr) broadcast_tensors(shards.replicas->module().buffers(), 0, *group);
  Told told;
  std::vector<Tensor> sums;
  attempt(group, [&] { sums = compute(shards, opening, x, y, part_of, told); });
  if (group != nullptr) told = of_all(exchange(told, *group));
  const Tensor total = join(shards, sums, told);
  return shards.replicas->listen(reduction == Reduction::mean ? mean_of_parts(total, told.normalizer) : total);
}

}  // namespace tandem::parallel
