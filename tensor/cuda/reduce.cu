// Reductions. How a sum is cut depends on the sizes alone, and its pieces are added in one order, so that every run has
// the same bits. Sums are made in double (int64 for integers).
#include <tandem/tensor/cuda/columns.h>
#include <tandem/tensor/cuda/kernels.h>
#include <tandem/tensor/cuda/places.h>
#include <tandem/tensor/dispatch.h>
#include <tandem/tensor/reduction.h>

namespace tandem::cuda {
namespace {

constexpr std::int64_t kShort = 32;  // elements that one thread combines alone

// Which of two values is the extreme one; the first NaN wins.
struct Extreme {
  bool largest;
  template <class T>
  TANDEM_DEVICE bool better(T value, T best) const {
    return best == best && (value != value || (largest ? value > best : value < best));
  }
  template <class T>
  TANDEM_DEVICE T operator()(T a, T b) const {
    return better(b, a) ? b : a;
  }
};

// x and its result, and how values are combined. What differs little is told at run time: kernels compile slowly.
template <class T, class Acc, class Combine>
struct Reduction {
  ReducePart kept, reduced;
  const T* x;
  T* to;
  Acc identity;
  Combine combine;
  bool square;

  // Element `i` of those that go into a result, which begin at `from`.
  TANDEM_DEVICE Acc load(std::int64_t from, std::int64_t i) const {
    const T element = x[from + reduced.at(i, reduced.dims).x];
    const auto value = static_cast<typename Reducer<T, ReduceKind::sum>::Lane>(element);
    return static_cast<Acc>(square ? value * value : value);
  }
};

// One result a thread.
template <class T, class Acc, class Combine>
struct ReduceShort {
  Reduction<T, Acc, Combine> all;
  TANDEM_DEVICE void operator()(std::int64_t k) const {
    const ReducePart::Offsets at = all.kept.at(k, all.kept.dims);
    Acc total = all.identity;
    for (std::int64_t i = 0; i < all.reduced.count; ++i) total = all.combine(total, all.load(at.x, i));
    all.to[at.to] = static_cast<T>(total);
  }
};

// One result, or one piece of it, a team.
template <class T, class Acc, class Combine>
struct ReduceTeam {
  Reduction<T, Acc, Combine> all;
  std::int64_t pieces, piece;  // number and elements of each
  Acc* partial;                // when there are several
  TANDEM_DEVICE void operator()(const Team& team, std::int64_t t) const {
    const ReducePart::Offsets at = all.kept.at(t / pieces, all.kept.dims);
    const std::int64_t first = t % pieces * piece, left = all.reduced.count - first;
    const Acc total = team.reduce(left < piece ? left : piece, all.identity, all.combine,
                                  [&](std::int64_t i) { return all.load(at.x, first + i); });
    team.once([&] {
      if (partial != nullptr)
        partial[t] = total;
      else
        all.to[at.to] = static_cast<T>(total);
    });
  }
};

template <class T, class Acc, class Combine>
struct CombinePieces {
  Reduction<T, Acc, Combine> all;
  std::int64_t pieces;
  const Acc* partial;
  TANDEM_DEVICE void operator()(const Team& team, std::int64_t k) const {
    const Acc total =
        team.reduce(pieces, all.identity, all.combine, [&](std::int64_t i) { return partial[k * pieces + i]; });
    team.once([&] { all.to[all.kept.at(k, all.kept.dims).to] = static_cast<T>(total); });
  }
};

// The last kept dimension holds the columns, those before it the matrices.
template <class T, class Acc, class Combine>
struct LoadColumn {
  Reduction<T, Acc, Combine> all;
  TANDEM_DEVICE Acc operator()(std::int64_t matrix, std::int64_t row, std::int64_t column) const {
    return all.load(column + all.kept.at(matrix, all.kept.dims - 1).x, row);
  }
};
template <class T, class Acc>
struct StoreColumn {
  ReducePart kept;
  T* to;
  TANDEM_DEVICE void operator()(std::int64_t matrix, std::int64_t column, Acc total) const {
    to[kept.at(matrix, kept.dims - 1).to + column * kept.to[kept.dims - 1]] = static_cast<T>(total);
  }
};

template <class T, class Acc, class Combine>
void reduce_typed(const View& x, const View& to, Acc identity, Combine combine, bool square = false) {
  const ReduceParts parts(x, to);
  const ReducePart &kept = parts.kept, &reduced = parts.reduced;
  if (kept.count == 0) return;
  const cudaStream_t stream = use(to.device);
  const Reduction<T, Acc, Combine> all{kept, reduced, x.ptr<const T>(), to.ptr<T>(), identity, combine, square};
  const std::int64_t stride = reduced.dims > 0 ? reduced.x[reduced.dims - 1] : 1;
  if (kept.dims > 0 && kept.x[kept.dims - 1] == 1 && stride != 1 && reduced.count > 1) {
    const std::int64_t width = kept.shape[kept.dims - 1];
    return combine_columns(to.device, {kept.count / width, reduced.count, width}, identity, combine,
                           LoadColumn<T, Acc, Combine>{all}, StoreColumn<T, Acc>{kept, all.to});
  }
  if (reduced.count <= kShort) return for_each_index(stream, kept.count, ReduceShort<T, Acc, Combine>{all});
  // Where there are few results, each is made of pieces, so that there is work for the whole device.
  constexpr std::int64_t kPiece = 4096, kPieces = 1024, kFewResults = 1024;
  using Whole = ReduceTeam<T, Acc, Combine>;
  if (reduced.count < 2 * kPiece || kept.count >= kFewResults)
    return for_each_team(stream, kept.count, Whole{all, 1, reduced.count, nullptr});
  const std::int64_t least = (reduced.count + kPieces - 1) / kPieces, piece = least < kPiece ? kPiece : least;
  const std::int64_t pieces = (reduced.count + piece - 1) / piece;
  const Scratch scratch(to.device, static_cast<std::size_t>(kept.count * pieces) * sizeof(Acc));
  auto* const partial = static_cast<Acc*>(scratch.data());
  for_each_team(stream, kept.count * pieces, Whole{all, pieces, piece, partial});
  for_each_team(stream, kept.count, CombinePieces<T, Acc, Combine>{all, pieces, partial});
}

template <class T>
struct ArgReduce {
  Places<3> places;  // the first element along the dimension, the value, the index
  std::int64_t n, stride;
  Extreme extreme;

  TANDEM_DEVICE void operator()(std::int64_t k) const {
    char* at[3];
    places.at(k, at);
    T best = value_at<T>(at[0]);
    std::int64_t where = 0;
    for (std::int64_t i = 1; i < n; ++i) {
      const T value = value_at<T>(at[0] + i * stride);
      if (!extreme.better(value, best)) continue;
      best = value;
      where = i;
    }
    value_at<T>(at[1]) = best;
    value_at<std::int64_t>(at[2]) = where;
  }

  // The extreme value, then the first place where it stands.
  TANDEM_DEVICE void operator()(const Team& team, std::int64_t k) const {
    char* at[3];
    places.at(k, at);
    const auto value = [&](std::int64_t i) { return value_at<T>(at[0] + i * stride); };
    const T best = team.reduce(n, value(0), extreme, value);
    const std::int64_t where = team.reduce(n, n, Min(), [&](std::int64_t i) {
      const T v = value(i);
      return v == best || (v != v && best != best) ? i : n;
    });
    team.once([&] {
      value_at<T>(at[1]) = best;
      value_at<std::int64_t>(at[2]) = where;
    });
  }
};

}  // namespace

void reduce(ReduceKind kind, const View& x, const View& to) {
  dispatch_number("reduce", x.dtype, [&]<class T>() {
    using Acc = typename Reducer<T, ReduceKind::sum>::Acc;
    if (kind == ReduceKind::sum || kind == ReduceKind::sum_squares)
      reduce_typed<T>(x, to, Acc(0), Sum(), kind == ReduceKind::sum_squares);
    else if (kind == ReduceKind::max)
      reduce_typed<T>(x, to, Reducer<T, ReduceKind::max>::identity(), Extreme{true});
    else
      reduce_typed<T>(x, to, Reducer<T, ReduceKind::min>::identity(), Extreme{false});
  });
}

void arg_reduce(bool largest, int dim, const View& x, const View& values, const View& indices) {
  const cudaStream_t stream = use(values.device);
  View heads = x;
  if (x.dims > 0) heads.shape[dim] = 1;
  const std::int64_t n = x.dims > 0 ? x.shape[dim] : 1, stride = x.dims > 0 ? x.strides[dim] : 0;
  dispatch_number("arg_reduce", x.dtype, [&]<class T>() {
    const ArgReduce<T> body{
        places<3>({&heads, &values, &indices}), n, stride * static_cast<std::int64_t>(sizeof(T)), {largest}};
    // Threads side by side read side by side, along the dimension or across it.
    constexpr std::int64_t kManyResults = 4096;
    if (n <= kShort || (stride != 1 && heads.numel() >= kManyResults))
      for_each_index(stream, heads.numel(), body);
    else
      for_each_team(stream, heads.numel(), body);
  });
}

}  // namespace tandem::cuda
