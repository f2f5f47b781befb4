// Reading and adding at indices. What is added to one element is added in the order of the indices, as on the CPU, so
// that the sums have the CPU's bits. An index that is out of range, which check_range tells the host about, reads 0 and
// adds nothing.
//
// Note [Adding at indices]
// A line is what an index runs along: the elements of x that differ in dimension `dim` only. Lines do not meet. Short
// ones are walked: a thread a line adds one source after the other, in n steps. Where that would leave the device idle,
// sources are first sorted by their targets, which keeps the order of equal ones; then a thread a target adds those
// that follow each other. The sort takes eight bits of the target a pass and compares each source 256 times in a pass,
// twice; it needs 32 bytes a source. A target that most sources go to makes one thread's loop as long.
#include <algorithm>
#include <utility>

#include <tandem/tensor/cuda/allocator.h>
#include <tandem/tensor/cuda/kernels.h>
#include <tandem/tensor/cuda/launch.h>
#include <tandem/tensor/cuda/places.h>
#include <tandem/tensor/dispatch.h>

namespace tandem::cuda {
namespace {

std::int64_t byte_stride(const View& view, int dim) {
  return dim < view.dims ? view.strides[dim] * static_cast<std::int64_t>(size_of(view.dtype)) : 0;
}

std::int64_t size_along(const View& view, int dim) { return dim < view.dims ? view.shape[dim] : 1; }

// A vector of indices as the index of every line of `like`.
View along(const View& vector, int dim, const View& like) {
  View index = like;
  index.data = vector.data;
  index.dtype = vector.dtype;
  for (int d = 0; d < index.dims; ++d) index.strides[d] = d == dim ? vector.strides[0] : 0;
  return index;
}

// x with the shape of `index` and without dimension `dim`, which is addressed by the index.
View without(const View& x, int dim, const View& index) {
  View rest = x;
  for (int d = 0; d < rest.dims; ++d) {
    rest.shape[d] = index.shape[d];
    if (d == dim) rest.strides[d] = 0;
  }
  return rest;
}

template <class T>
struct Gather {
  Places<3> places;         // y, index, the line of x
  std::int64_t size, step;  // of x's line, and from one element of it to the next
  TANDEM_DEVICE void operator()(std::int64_t i) const {
    char* at[3];
    places.at(i, at);
    const auto index = value_at<std::int64_t>(at[1]);
    value_at<T>(at[0]) = index >= 0 && index < size ? value_at<T>(at[2] + index * step) : T(0);
  }
};

// The lines of g, index and x.
struct Lines {
  Places<3> places;  // their first elements
  std::int64_t steps[3];
  std::int64_t lines, sources, targets;  // number of lines, and of elements of a line
};

Lines lines_of(const View& g, int dim, const View& index, const View& x) {
  const View rest = without(x, dim, index);
  View first[3] = {g, index, rest};
  for (View& view : first)
    if (dim < view.dims) view.shape[dim] = 1;
  return {places<3>({&first[0], &first[1], &first[2]}),
          {byte_stride(g, dim), byte_stride(index, dim), byte_stride(x, dim)},
          first[1].numel(),
          size_along(index, dim),
          size_along(x, dim)};
}

template <class T>
struct Walk {
  Lines all;
  TANDEM_DEVICE void operator()(std::int64_t line) const {
    char* at[3];
    all.places.at(line, at);
    for (std::int64_t i = 0; i < all.sources; ++i) {
      const std::int64_t target = value_at<std::int64_t>(at[1] + i * all.steps[1]);
      if (target < 0 || target >= all.targets) continue;
      T& to = value_at<T>(at[2] + target * all.steps[2]);
      to = static_cast<T>(to + value_at<T>(at[0] + i * all.steps[0]));
    }
  }
};

// Sources in the order of their targets. Where all lines have one index, a source and a target stand for a whole row:
// an element of every line.
struct Sorted {
  std::int64_t* targets;
  std::int64_t* sources;
};

struct ReadTargets {
  Lines all;
  std::int64_t none;  // greater than all targets
  Sorted to;
  TANDEM_DEVICE void operator()(std::int64_t i) const {
    const std::int64_t line = i / all.sources;
    char* at[3];
    all.places.at(line, at);
    const auto target = value_at<std::int64_t>(at[1] + i % all.sources * all.steps[1]);
    to.targets[i] = target >= 0 && target < all.targets ? line * all.targets + target : none;
    to.sources[i] = i;
  }
};

constexpr std::int64_t kDigits = 256;
constexpr std::int64_t kMaxBlocks = 512;

// One pass over the sources, in blocks of consecutive ones. A thread has one digit of one block.
struct Pass {
  Sorted from, to;
  std::int64_t count, block, blocks;
  int shift;
  std::int64_t* counts;  // {blocks, kDigits}
  std::int64_t* totals;  // {kDigits}

  TANDEM_DEVICE bool has(std::int64_t digit, std::int64_t i) const {
    return ((from.targets[i] >> shift) & (kDigits - 1)) == digit;
  }
  TANDEM_DEVICE std::int64_t end(std::int64_t b) const { return (b + 1) * block < count ? (b + 1) * block : count; }
};
struct CountDigit {
  Pass pass;
  TANDEM_DEVICE void operator()(std::int64_t thread) const {
    const std::int64_t b = thread / kDigits, digit = thread % kDigits;
    std::int64_t n = 0;
    for (std::int64_t i = b * pass.block; i < pass.end(b); ++i) n += pass.has(digit, i) ? 1 : 0;
    pass.counts[thread] = n;
  }
};
struct TotalDigit {
  Pass pass;
  TANDEM_DEVICE void operator()(std::int64_t digit) const {
    std::int64_t n = 0;
    for (std::int64_t b = 0; b < pass.blocks; ++b) n += pass.counts[b * kDigits + digit];
    pass.totals[digit] = n;
  }
};
struct PlaceDigit {
  Pass pass;
  TANDEM_DEVICE void operator()(std::int64_t thread) const {
    const std::int64_t b = thread / kDigits, digit = thread % kDigits;
    std::int64_t at = 0;
    for (std::int64_t d = 0; d < digit; ++d) at += pass.totals[d];
    for (std::int64_t before = 0; before < b; ++before) at += pass.counts[before * kDigits + digit];
    for (std::int64_t i = b * pass.block; i < pass.end(b); ++i) {
      if (!pass.has(digit, i)) continue;
      pass.to.targets[at] = pass.from.targets[i];
      pass.to.sources[at++] = pass.from.sources[i];
    }
  }
};

// The thread of a target's first source adds all that follow it. Thread i has row i / width, and there line i % width.
template <class T>
struct AddSorted {
  Lines all;
  Sorted sorted;
  std::int64_t none, rows, width;
  TANDEM_DEVICE void operator()(std::int64_t i) const {
    const std::int64_t first = i / width, target = sorted.targets[first];
    if (target == none || (first > 0 && sorted.targets[first - 1] == target)) return;
    char* at[3];
    all.places.at(target / all.targets + i % width, at);
    T& to = value_at<T>(at[2] + target % all.targets * all.steps[2]);
    T sum = to;
    for (std::int64_t row = first; row < rows && sorted.targets[row] == target; ++row)
      sum = static_cast<T>(sum + value_at<T>(at[0] + sorted.sources[row] % all.sources * all.steps[0]));
    to = sum;
  }
};

template <class T>
void add_sorted(Device device, cudaStream_t stream, const Lines& all, bool one_index) {
  const std::int64_t rows = one_index ? all.sources : all.sources * all.lines, width = one_index ? all.lines : 1;
  const std::int64_t block = std::max<std::int64_t>(256, (rows + kMaxBlocks - 1) / kMaxBlocks);
  const std::int64_t blocks = (rows + block - 1) / block, none = all.targets * (one_index ? 1 : all.lines);
  const Scratch scratch(device, static_cast<std::size_t>(4 * rows + (blocks + 1) * kDigits) * sizeof(std::int64_t));
  auto* const memory = static_cast<std::int64_t*>(scratch.data());
  Pass pass{{memory, memory + rows}, {memory + 2 * rows, memory + 3 * rows}, rows, block, blocks, 0,
            memory + 4 * rows,       memory + 4 * rows + blocks * kDigits};
  for_each_index(stream, rows, ReadTargets{all, none, pass.from});
  for (; (none >> pass.shift) > 0; pass.shift += 8) {
    for_each_index(stream, blocks * kDigits, CountDigit{pass});
    for_each_index(stream, kDigits, TotalDigit{pass});
    for_each_index(stream, blocks * kDigits, PlaceDigit{pass});
    std::swap(pass.from, pass.to);
  }
  for_each_index(stream, rows * width, AddSorted<T>{all, pass.from, none, rows, width});
}

}  // namespace

void gather(const View& x, int dim, const View& index, const View& y) {
  const cudaStream_t stream = use(y.device);
  const View rest = without(x, dim, index);
  const Places<3> all = places<3>({&y, &index, &rest});
  dispatch_bits(x.dtype, [&]<class T>() {
    for_each_index(stream, y.numel(), Gather<T>{all, size_along(x, dim), byte_stride(x, dim)});
  });
}

void scatter_add(const View& g, int dim, const View& index, const View& x) {
  constexpr std::int64_t kWalked = 128;                    // a longer line takes one thread longer than a sort
  constexpr std::int64_t kSorted = std::int64_t{1} << 22;  // sources of different lines, for their memory
  const Lines all = lines_of(g, dim, index, x);
  if (all.lines == 0 || all.sources == 0) return;
  bool one_index = true;
  for (int d = 0; d < index.dims; ++d)
    one_index = one_index && (d == dim || index.shape[d] == 1 || index.strides[d] == 0);
  const bool walk = all.sources <= kWalked || (!one_index && all.sources * all.lines > kSorted);
  const cudaStream_t stream = use(x.device);
  dispatch_number("scatter_add", x.dtype, [&]<class T>() {
    if (walk)
      for_each_index(stream, all.lines, Walk<T>{all});
    else
      add_sorted<T>(x.device, stream, all, one_index);
  });
}

void index_select(const View& x, int dim, const View& index, const View& y) { gather(x, dim, along(index, dim, y), y); }

void index_add(const View& g, int dim, const View& index, const View& x) {
  scatter_add(g, dim, along(index, dim, g), x);
}

}  // namespace tandem::cuda
